"""Jobs as metrics for Prometheus, in OpenMetrics or as a file for node_exporter."""
