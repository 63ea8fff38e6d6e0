"""Sessions in containers: the backends "docker", "podman" and "kubernetes"."""
