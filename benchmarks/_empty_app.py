"""The floor of a POST: a FastAPI app that takes a body and answers `{}`. Prints its URL, serves until SIGTERM."""

import socket

import uvicorn
import uvloop
from fastapi import FastAPI, Request, Response

app = FastAPI(openapi_url=None)


@app.post("/v1/prefetch")
async def empty(request: Request) -> Response:
    await request.body()
    return Response(b"{}", media_type="application/json")


def main() -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app, http="httptools", ws="none", lifespan="off", log_config=None)
    uvloop.run(uvicorn.Server(config).serve([sock]))


if __name__ == "__main__":
    main()
