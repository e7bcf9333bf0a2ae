"""What every command shares: presets, arguments, and how errors reach a person."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import typer

from deploy.console import CONSOLE
from services.config.load import load_config, preset_names
from services.config.schema import ClusterConfig
from services.core.errors import ConfigError, LongtailError, StopRequested

PRESETS_DIR = Path(__file__).parent / "presets"


@contextmanager
def errors_told() -> Iterator[None]:
    """A typed error becomes one message on stderr and its exit code; anything else is a bug and keeps its traceback."""
    try:
        yield
    except StopRequested as error:
        print(f"stopped: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from error
    except LongtailError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt as error:
        print("stopped", file=sys.stderr)
        raise typer.Exit(StopRequested.exit_code) from error


def interrupt_on_sigterm() -> None:
    """SIGTERM (a container being stopped) ends a run as Ctrl-C does: processes gone, run folder valid.

    Call it again after `ray.init`, which puts a handler of its own in place that aborts.
    """

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def config_of(config: str, settings: Sequence[str], extra: Sequence[str] = ()) -> ClusterConfig:
    """`settings` are dotted overrides (with "=") and further YAML files (without); overrides win over every file."""
    files = [s for s in settings if "=" not in s]
    overrides = [s for s in settings if "=" in s]
    for name in files:
        if not Path(name).exists() and name not in preset_names(PRESETS_DIR):
            raise ConfigError(f"{name!r} is neither key=value, such as rollout.group_size=4, nor a YAML file")
    return load_config(config, *files, overrides=[*overrides, *extra], presets_dir=PRESETS_DIR)


def training_config(
    config: str | None, settings: Sequence[str], run_dir: Path | None, resume: str | None
) -> ClusterConfig:
    """What `longtail train` runs: CONFIG, or with `resume` (a run folder, or URL/RUN_ID) what its run folder says."""
    if resume is None:
        if config is None:
            raise ConfigError("name a configuration: a YAML file or a preset; or a run folder with --resume")
        return config_of(config, settings, [] if run_dir is None else [f"run.dir={json.dumps(str(run_dir))}"])
    if config is not None and "=" not in config:
        raise ConfigError(f"--resume goes on with the configuration of {resume}: leave {config!r} out")
    words = [*([config] if config else []), *settings]
    if "://" in resume:
        url, _, run_id = resume.rstrip("/").rpartition("/")
        folder = _brought(url, run_id, Path("runs") if run_dir is None else run_dir)
        return _resumed_config(folder, [f"run.checkpoint_url={json.dumps(url)}", *words])
    if run_dir is not None:
        raise ConfigError("--resume names the run folder: leave --run-dir out")
    return _resumed_config(Path(resume), words)


def _resumed_config(folder: Path, words: Sequence[str]) -> ClusterConfig:
    stored = folder / "config.yaml"
    if not stored.is_file():
        raise ConfigError(f"{folder} is no run folder (it has no config.yaml): name a folder under runs/")
    own = [f"run.dir={json.dumps(str(folder.parent))}", f"run.id={json.dumps(folder.resolve().name)}"]
    return config_of(str(stored), words, own)


def _brought(url: str, run_id: str, runs_dir: Path) -> Path:
    from deploy.uploading import bring

    folder = runs_dir / run_id
    if not bring(url, run_id, runs_dir, CONSOLE.print) and not folder.is_dir():
        raise ConfigError(f"there is no whole step at {url}/{run_id}: name the URL with the run's id at its end")
    return folder


def pairs_of(settings: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE words as a mapping. Raises ConfigError."""
    for setting in settings:
        if not setting.partition("=")[0] or "=" not in setting:
            raise ConfigError(f"{setting!r} is not NAME=VALUE")
    return {name: value for name, _, value in (s.partition("=") for s in settings)}
