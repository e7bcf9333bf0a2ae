"""The OpenAI API over a generator: plain FastAPI and pydantic, no torch. Who generates is decided in `deploy/`."""
