"""Serve a corpus over HTTP: ``POST /retrieve``, ``GET /health``.

    python scripts/serve_retriever.py                          # the embedded factbook on 127.0.0.1:8000
    python scripts/serve_retriever.py --corpus wiki.jsonl --port 9000

Training then finds it with ``task.env.retriever=http://127.0.0.1:8000``.
"""

from __future__ import annotations

import argparse

from torchrl_copc.envs.search.factory import make_retriever


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a corpus over HTTP.")
    parser.add_argument(
        "--corpus", default="factbook", help='"factbook" or a JSONL file with {"id", "contents"} on each line'
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="0.0.0.0 serves other machines, without access control"
    )
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    if args.corpus.startswith(("http://", "https://")):
        parser.error(f"--corpus {args.corpus}: an address is already a server; give a file")

    import uvicorn

    from torchrl_copc.envs.search.server import create_app

    try:
        retriever = make_retriever(args.corpus)
    except (FileNotFoundError, ValueError) as error:
        parser.error(f"--corpus: {error}")
    uvicorn.run(create_app(retriever), host=args.host, port=args.port)


if __name__ == "__main__":
    main()
