"""vLLM as an engine: in this process, or a server that is asked over a socket."""
