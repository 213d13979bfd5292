"""The engine: requests in, tokens out. Owns scheduling (host ints), batches, the forward step,
sampling and the messages to and from a frontend. Refuses to know HTTP, and any one model or kernel
by name."""
