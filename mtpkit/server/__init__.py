"""The HTTP server of `mtpkit serve`, with the interface of OpenAI's and of vLLM's servers.

`run` starts and ends it, `app` puts the routes together, and `service` is what the routes share.
`protocol` has the bodies of requests and responses.
"""
