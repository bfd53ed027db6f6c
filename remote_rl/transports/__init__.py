"""Transport: ways from a client to a dispatcher, one module each, all behind `messages.Transport`
(imports nothing here, so that a client pays only for the one it uses)."""
