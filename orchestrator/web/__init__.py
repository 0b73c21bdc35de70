"""An HTTP server for people and for Prometheus. It reads journals and changes nothing."""
