"""The command line: `forestage serve|config|prefetch|lookup|hash|status|pool|top|l3`."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import TypeAlias

from forestage import __version__
from forestage.cli.exits import Exit

__all__ = ["main"]

_CODES = """exit codes:
  0  done as asked             2  bad command line or configuration   4  miss (prefetch)
  1  no answer, or refused     3  partial (prefetch), degraded (status), bad pages (l3 verify)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone; point stdout elsewhere, so that its last flush does not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILED
    except ModuleNotFoundError as error:
        print(f'forestage: needs {error.name}: pip install "forestage[service]"', file=sys.stderr)
        return Exit.FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forestage",
        description="Brings KV-cache pages into a shared host pool before an LLM engine needs them.",
        epilog=_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"forestage {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_config(commands)
    _add_prefetch(commands)
    _add_lookup(commands)
    _add_hash(commands)
    _add_status(commands)
    _add_pool(commands)
    _add_top(commands)
    _add_l3(commands)
    return parser


_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001  (argparse names its type so)


def _command(commands: _Commands, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"example:\n  {example}\n\n{_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_serve(commands: _Commands) -> None:
    parser = _command(commands, "serve", "run the service", "forestage serve --config examples/forestage.toml")
    parser.add_argument("--config", metavar="FILE", help="TOML file; FORESTAGE_* variables win over it")
    parser.add_argument("--grace", metavar="SECONDS", type=_seconds, default=10.0, help="time to stop in (10)")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    form = "form of the log; auto is text for a terminal, else JSON (auto)"
    parser.add_argument("--log-format", choices=("auto", "text", "json"), default="auto", help=form)
    parser.set_defaults(run=_serve)


def _add_config(commands: _Commands) -> None:
    example = "FORESTAGE_POOL__BYTES=8Gi forestage config --config forestage.toml"
    parser = _command(commands, "config", "check and print the effective configuration, secrets masked", example)
    parser.add_argument("--config", metavar="FILE")
    parser.set_defaults(run=_config)


def _add_client(parser: argparse.ArgumentParser) -> None:
    # No variable of its own: one that begins with FORESTAGE_ would stop a `serve` in the same environment.
    parser.add_argument("--url", default="http://127.0.0.1:8470", help="http://HOST:PORT or unix:/PATH (%(default)s)")
    parser.add_argument("--token-file", metavar="FILE", help="file with the bearer token")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_prefix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True)
    parser.add_argument("--keys", metavar="FILE", help="page keys as hex, separated by space or lines; - for stdin")
    parser.add_argument("key", nargs="*", help="page keys as hex, in prefix order")
    _add_prompt(parser)
    parser.add_argument("--device-pages", type=int, default=0, metavar="N", help="leading pages already on the GPU")


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", metavar="FILE", help="token ids, separated by space or lines; - for stdin")
    parser.add_argument("--extra-key", metavar="TEXT", help="with --tokens: SGLang's extra key of the request")
    parser.add_argument("--cache-salt", metavar="TEXT", help="with --tokens: cache salt of the request")
    parser.add_argument("--lora", metavar="ID", help="with --tokens: adapter, its id for SGLang, its name for vLLM")
    parser.add_argument("--lora-path", metavar="PATH", help="with --lora: the adapter's path, for vLLM")


def _add_prefetch(commands: _Commands) -> None:
    example = "forestage prefetch --model demo --keys keys.txt --deadline-ms 500"
    parser = _command(commands, "prefetch", "bring a prefix into the pool and say how long it is", example)
    _add_client(parser)
    _add_prefix(parser)
    parser.add_argument("--min-pages", type=int, metavar="N", help="read nothing for a gain of fewer pages")
    parser.add_argument("--priority", type=int, metavar="N", help="higher goes first")
    parser.add_argument("--deadline-ms", type=int, metavar="MS", help="end by then with what is ready")
    parser.add_argument("--lease-ms", type=int, metavar="MS", help="how long the slots stay")
    parser.add_argument("--request-id", metavar="ID")
    parser.set_defaults(run=_prefetch)


def _add_lookup(commands: _Commands) -> None:
    example = "forestage lookup --model demo --keys keys.txt"
    parser = _command(commands, "lookup", "say what a prefetch would find, without fetching", example)
    _add_client(parser)
    _add_prefix(parser)
    parser.set_defaults(run=_lookup)


def _add_hash(commands: _Commands) -> None:
    example = "forestage hash --model demo --tokens tokens.txt"
    parser = _command(commands, "hash", "say the page keys of a prompt", example)
    _add_client(parser)
    parser.add_argument("--model", required=True)
    _add_prompt(parser)
    parser.set_defaults(run=_hash)


def _add_status(commands: _Commands) -> None:
    parser = _command(commands, "status", "say how a running service is doing", "forestage status")
    _add_client(parser)
    parser.set_defaults(run=_status)


def _add_pool(commands: _Commands) -> None:
    parser = _command(commands, "pool", "show the pool of a running service, slot by state", "forestage pool")
    _add_client(parser)
    parser.set_defaults(run=_pool)


def _add_top(commands: _Commands) -> None:
    parser = _command(commands, "top", "show a running service at work, as its page does", "forestage top")
    _add_client(parser)
    parser.add_argument("--interval", metavar="SECONDS", type=_seconds, default=1.0, help="time between pictures (1)")
    parser.add_argument("--once", action="store_true", help="one picture, also to a terminal")
    parser.set_defaults(run=_top)


def _add_l3(commands: _Commands) -> None:
    summary = "look at, copy, verify and remove what lies in L3"
    parser = _command(commands, "l3", summary, "forestage l3 ls --config forestage.toml --summary")
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    _add_l3_ls(actions)
    _add_l3_put(actions)
    _add_l3_verify(actions)
    _add_l3_rm(actions)


def _add_l3_ls(actions: _Commands) -> None:
    example = "forestage l3 ls --config forestage.toml --model demo"
    parser = _command(actions, "ls", "list the pages that are stored, by model and component", example)
    parser.add_argument("--config", metavar="FILE", required=True)
    parser.add_argument("--model", help="only this one")
    parser.add_argument("--summary", action="store_true", help="only numbers and bytes")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_l3_ls)


def _add_l3_put(actions: _Commands) -> None:
    example = "forestage l3 put --config forestage.toml --model demo --from hicache-file:/var/hicache"
    parser = _command(actions, "put", "copy the pages of a model into the configured storage", example)
    parser.add_argument("--config", metavar="FILE", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="KIND:PLACE",
        help="hicache-file:DIR, vllm-file:DIR, lmcache-file:DIR, file:DIR, or config:FILE for the storage of another "
        "configuration",
    )
    parser.set_defaults(run=_l3_put)


def _add_l3_verify(actions: _Commands) -> None:
    example = "forestage l3 verify --config forestage.toml"
    parser = _command(actions, "verify", "read every stored page and check it", example)
    parser.add_argument("--config", metavar="FILE", required=True)
    parser.add_argument("--model", help="only this one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_l3_verify)


def _add_l3_rm(actions: _Commands) -> None:
    example = "forestage l3 rm --config forestage.toml --model demo --all --yes"
    parser = _command(actions, "rm", "remove pages of a model, all components of them", example)
    parser.add_argument("--config", metavar="FILE", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--all", action="store_true", help="every page of the model")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("key", nargs="*", help="page keys as hex")
    parser.set_defaults(run=_l3_rm)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 86_400:
        raise argparse.ArgumentTypeError("must be 0 to 86400 seconds")
    return value


def _serve(arguments: argparse.Namespace) -> int:
    # Until the service has handlers of its own nothing is taken that would have to be given back.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # asks to read again what has yet to be read
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: os._exit(Exit.OK))

    from forestage.cli.serve import serve

    return serve(arguments.config, arguments.grace, arguments.log_level, arguments.log_format)


def _config(arguments: argparse.Namespace) -> int:
    from forestage.cli.settings import show

    return show(arguments.config)


def _prefetch(arguments: argparse.Namespace) -> int:
    from forestage.cli.ask import prefetch

    return prefetch(arguments)


def _lookup(arguments: argparse.Namespace) -> int:
    from forestage.cli.ask import lookup

    return lookup(arguments)


def _hash(arguments: argparse.Namespace) -> int:
    from forestage.cli.ask import hash_prompt

    return hash_prompt(arguments)


def _status(arguments: argparse.Namespace) -> int:
    from forestage.cli.ask import status

    return status(arguments)


def _pool(arguments: argparse.Namespace) -> int:
    from forestage.cli.ask import pool

    return pool(arguments)


def _top(arguments: argparse.Namespace) -> int:
    from forestage.cli.top import top

    return top(arguments)


def _l3_ls(arguments: argparse.Namespace) -> int:
    from forestage.cli.l3 import ls

    return ls(arguments)


def _l3_put(arguments: argparse.Namespace) -> int:
    from forestage.cli.l3_put import put

    return put(arguments)


def _l3_verify(arguments: argparse.Namespace) -> int:
    from forestage.cli.l3 import verify

    return verify(arguments)


def _l3_rm(arguments: argparse.Namespace) -> int:
    from forestage.cli.l3 import rm

    return rm(arguments)
