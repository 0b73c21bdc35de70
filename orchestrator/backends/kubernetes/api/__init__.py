"""The API server: credentials, requests, watches, and its errors."""
