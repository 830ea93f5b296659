"""Ask a server one question over the OpenAI API, waiting until it is ready.

    python scripts/ask.py "What is the capital of France?" --port 8000

Models without a chat template get the question as text to continue.
"""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer
from openai import APIConnectionError, BadRequestError, OpenAI


def wait(client: OpenAI, seconds: float, pid: int | None) -> str:
    """The name of the model that is served, once the server answers.

    Raises:
        SystemExit: the process `pid` is gone, or the time is over.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            return client.models.list().data[0].id
        except APIConnectionError:
            time.sleep(1)
        if pid is not None and not _alive(pid):
            raise SystemExit("ask: the server has stopped")
    raise SystemExit(f"ask: no answer within {seconds:g} s")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ask(client: OpenAI, model: str, question: str, tokens: int) -> str:
    """The greedy answer."""
    options = {"model": model, "max_tokens": tokens, "temperature": 0}
    try:
        chat = client.chat.completions.create(
            messages=[{"role": "user", "content": question}], **options
        )
        return chat.choices[0].message.content or ""
    except BadRequestError as error:
        if "chat template" not in str(error):
            raise
        return client.completions.create(prompt=question, **options).choices[0].text


def main(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    host: Annotated[str, typer.Option(help="Where the server is.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Its port.")] = 8000,
    tokens: Annotated[int, typer.Option(help="Longest answer.")] = 64,
    seconds: Annotated[float, typer.Option(help="Longest wait for readiness.")] = 600,
    pid: Annotated[int | None, typer.Option(help="Stop waiting when this process ends.")] = None,
) -> None:
    """Ask a server one question over the OpenAI API."""
    client = OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0)
    print(ask(client, wait(client, seconds, pid), question, tokens).strip())


if __name__ == "__main__":
    typer.run(main)
