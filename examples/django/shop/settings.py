"""Settings of the example: SQLite for the data, and for the tasks, too."""

import os
from pathlib import Path

import django

BASE_DIR = Path(os.environ.get("SHOP_DATA", ".")).resolve()  # of the data

SECRET_KEY = "only for the example"
DEBUG = True
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "shop.urls"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": BASE_DIR / "shop.db",
        "OPTIONS": {"timeout": 20},
    }
}

INSTALLED_APPS = [
    "machinery_py.contrib.django",
    "shop",
]

MACHINERY = {
    "url": f"sqlite:///{BASE_DIR}/machinery.db",  # or redis://…, amqp://…, mongodb://…
    "results_expire_in": 3600,
}

INSTALLED_APPS += ["machinery_py.contrib.django.outbox"]  # its table; for order_for_sure

TASKS = {
    "default": {
        "BACKEND": "machinery_py.contrib.django.MachineryBackend",
        "QUEUES": ["default", "letters"],
    }
}
if django.VERSION >= (6, 0):  # with django.tasks; its tasks are in letters/tasks.py
    INSTALLED_APPS += ["letters"]
