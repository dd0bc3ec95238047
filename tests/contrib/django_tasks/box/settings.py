"""A project for the tests of MachineryBackend. `narrow` has a queue of its own, and tries twice."""

SECRET_KEY = "only for tests"
USE_TZ = True
TIME_ZONE = "Europe/Berlin"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "machinery_py.contrib.django",
    "box",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
ROOT_URLCONF = "box.urls"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

MACHINERY = {"url": "memory://box"}
BACKEND = "machinery_py.contrib.django.MachineryBackend"
TASKS = {
    "default": {"BACKEND": BACKEND, "QUEUES": ["default", "mail"]},
    "narrow": {
        "BACKEND": BACKEND,
        "QUEUES": ["narrow"],
        "OPTIONS": {"task_options": {"retries": 1}},
    },
    "apart": {
        "BACKEND": BACKEND,
        "OPTIONS": {"url": "memory://apart"},
    },
    "dummy": {"BACKEND": "django.tasks.backends.dummy.DummyBackend", "QUEUES": []},
}
