"""Runs over HTTP: the live page and the API behind it. Plain FastAPI; who serves it is decided in `deploy/`."""
