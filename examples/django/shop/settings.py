"""Settings of the example: SQLite for the data, and for the tasks, too."""

import os
from pathlib import Path

DATA = Path(os.environ.get("SHOP_DATA", "."))

SECRET_KEY = "only for the example"
DEBUG = True
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "shop.urls"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": DATA / "shop.db",
        "OPTIONS": {"timeout": 20},
    }
}

INSTALLED_APPS = [
    "machinery_py.contrib.django",
    "shop",
]

MACHINERY = {
    "url": f"sqlite:///{DATA.resolve()}/machinery.db",  # or redis://…, amqp://…, mongodb://…
    "results_expire_in": 3600,
}
