"""`longtail k8s`: manifests for Kubernetes, and their checks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli_shared import config_of, errors_told
from deploy.k8s.options import DEFAULT_IMAGE, DEFAULT_NAMESPACE, OVERLAYS, RenderOptions
from services.core.errors import ConfigError

k8s_app = typer.Typer(help="Manifests for Kubernetes with KubeRay.", no_args_is_help=True)


@k8s_app.command()
def render(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or the name of a preset.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE|FILE", help="Overrides, or further YAML files.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the kustomize tree; without it one overlay is printed.")
    ] = None,
    overlay: Annotated[str, typer.Option(help=f"What to print: {', '.join(OVERLAYS)}.")] = "job",
    run_id: Annotated[str | None, typer.Option(help="Names the RayJob and its run; default: run.name.")] = None,
    image: Annotated[str, typer.Option(help="Made from deploy/docker/Dockerfile.")] = DEFAULT_IMAGE,
    namespace: Annotated[str, typer.Option(help="Namespace of everything.")] = DEFAULT_NAMESPACE,
    retries: Annotated[int, typer.Option(help="New tries after a failed one; each goes on where the run was.")] = 1,
    slots_per_pod: Annotated[int, typer.Option(help="Rollout slots in one pod, for large machines.")] = 1,
) -> None:
    """Make the manifests of a run from its configuration."""
    with errors_told():
        if overlay not in OVERLAYS:
            raise ConfigError(f"--overlay {overlay!r} must be one of {', '.join(OVERLAYS)}")
        from deploy.k8s.render import built_overlay, write_tree
        from deploy.k8s.tree import render_tree

        resolved = config_of(config, settings or [])
        options = RenderOptions(run_id or resolved.run.name, image, namespace, retries, slots_per_pod)
        tree = render_tree(resolved, options)
        if out is None:
            print(built_overlay(tree, overlay), end="")
            return
        write_tree(tree, out)
        print(f"wrote {len(tree)} files; start the run with: kubectl apply -k {out / 'overlays' / 'job'}")


@k8s_app.command()
def validate(
    path: Annotated[
        str, typer.Argument(metavar="DIR|FILE|-", help="Kustomizations, manifests, or - for a stream.")
    ] = "-",
) -> None:
    """Check manifests against the schemas and the rules that a schema cannot say."""
    with errors_told():
        from deploy.k8s.validate import validate_path, validate_stream

        report = validate_stream(sys.stdin.read()) if path == "-" else validate_path(Path(path))
        for source, manifests in report.checked:
            print(f"{source}: {manifests} manifests")
        for finding in report.findings:
            print(f"error: {finding}", file=sys.stderr)
        if report.findings:
            count = len(report.findings)
            raise ConfigError(f"{count} mistake{'s' if count > 1 else ''} in the manifests")
        print("no mistakes found")
