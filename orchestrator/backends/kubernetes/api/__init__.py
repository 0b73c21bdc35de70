"""The API server: who asks, requests and watches, and what its refusals mean."""
