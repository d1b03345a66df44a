"""The retrieval server: one retriever behind ``POST /retrieve``."""

from __future__ import annotations

from typing import Annotated, Any

from torchrl_copc.envs.search.retriever import Retriever, RetrieverError, ScoredPassage

try:
    from fastapi import FastAPI
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from pydantic import BaseModel, Field, model_validator
    from starlette.exceptions import HTTPException
except ImportError as error:
    raise ImportError('the retrieval server needs FastAPI: pip install "torchrl_copc[envs]"') from error

MAX_TOP_K = 100
MAX_QUERIES = 1024


class RetrieveRequest(BaseModel):
    """Body of ``POST /retrieve``: ``queries`` or ``query``, how many passages each, and whether scores are
    wanted."""

    queries: Annotated[list[str], Field(max_length=MAX_QUERIES)] | None = None
    query: str | None = None
    topk: Annotated[int, Field(ge=1, le=MAX_TOP_K)] = 3
    return_scores: bool = False

    @model_validator(mode="after")
    def _one_form(self) -> RetrieveRequest:
        if (self.queries is None) == (self.query is None):
            raise ValueError('give either "queries" (a list) or "query" (a string)')
        return self


def create_app(retriever: Retriever) -> FastAPI:
    """An ASGI application that serves ``retriever``.

    ``POST /retrieve`` answers ``{"result": [[{"document": {"id", "contents"}, "score"}]]}``, one list a
    query; without ``return_scores`` the lists hold the documents themselves. Errors are ``{"error": str}``
    with a status code. ``GET /health`` answers ``{"status": "ok"}``.
    """
    app = FastAPI(title="torchrl_copc retriever")

    @app.post("/retrieve")
    async def retrieve(request: RetrieveRequest) -> dict[str, Any]:
        queries = [request.query or ""] if request.queries is None else request.queries
        results = await retriever.search(queries, request.topk)
        return {"result": [[_document(hit, request.return_scores) for hit in hits] for hits in results]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Any, error: RequestValidationError) -> JSONResponse:
        reasons = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        return _error(422, "; ".join(reasons))

    @app.exception_handler(HTTPException)
    async def refused(_: Any, error: HTTPException) -> JSONResponse:
        return _error(error.status_code, str(error.detail))

    @app.exception_handler(RetrieverError)
    async def unavailable(_: Any, error: RetrieverError) -> JSONResponse:
        return _error(503, str(error))

    @app.exception_handler(Exception)
    async def failed(_: Any, error: Exception) -> JSONResponse:
        return _error(500, f"{type(error).__name__}: {error}")

    return app


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status)


def _document(hit: ScoredPassage, with_score: bool) -> dict[str, Any]:
    document = {"id": hit.passage.id, "contents": hit.passage.contents}
    return {"document": document, "score": hit.score} if with_score else document
