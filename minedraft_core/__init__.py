"""The MineDraft pipeline: two sides of requests, a drafter on its own device, and the records of what they do."""
