"""Load tests of an OpenAI-compatible server with Locust, and the prompts they send. See docs/loadtest.md.

Locust swaps Python's blocking calls for gevent's when it is imported, so nothing that runs beside a server imports the modules that need
it: `users`, `shapes`, `recorder` and `locustfile`.
"""
