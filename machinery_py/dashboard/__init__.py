"""The dashboard: a web page and a JSON API over `server.inspect`, `schedules` and `control`."""
