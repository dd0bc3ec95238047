"""The tables of the example."""

import django.db.models.deletion
from django.db import migrations, models

KEY = models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")


class Migration(migrations.Migration):
    initial = True
    operations = (
        migrations.CreateModel(
            "Order", [("id", KEY.clone()), ("item", models.CharField(max_length=100))]
        ),
        migrations.CreateModel(
            "Receipt",
            [
                ("id", KEY.clone()),
                ("text", models.CharField(max_length=200)),
                (
                    "order",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE, to="shop.order"
                    ),
                ),
            ],
        ),
    )
