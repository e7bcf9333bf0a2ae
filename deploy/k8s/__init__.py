"""Manifests for Kubernetes with KubeRay, made from the configuration tree, and the checks that they must pass."""
