"""SGLang servers, as processes. Nothing here imports sglang: it is launched as a process and called over HTTP."""
