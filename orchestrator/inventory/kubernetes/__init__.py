"""Parses nodes and pods from the JSON of the Kubernetes API. Nothing here asks the API."""
