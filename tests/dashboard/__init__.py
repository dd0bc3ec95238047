"""Tests of the dashboard, over HTTP."""
