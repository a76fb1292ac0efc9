"""The HTTP server: OpenAI's completions API over one vLLM engine."""
