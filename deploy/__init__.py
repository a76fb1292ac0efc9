"""What runs MineDraft: containers, Prometheus, Grafana, Kubernetes."""
