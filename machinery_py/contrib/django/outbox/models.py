"""The table of the outbox."""

from __future__ import annotations

from django.db import models


class OutboxRow(models.Model):
    """A call that waits to be published; or was set aside, with the error."""

    id = models.BigAutoField(primary_key=True)
    uuid = models.CharField(max_length=255)
    name = models.CharField(max_length=255)
    created_at = models.DateTimeField(auto_now_add=True)
    body = models.BinaryField()
    failed_at = models.DateTimeField(null=True, blank=True)
    error = models.TextField(blank=True)

    class Meta:
        app_label = "machinery_outbox"
        db_table = "machinery_outbox"

    def __str__(self) -> str:
        return f"{self.name} {self.uuid}"
