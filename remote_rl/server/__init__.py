"""Server: a dispatcher behind HTTP (imports transports' bodies, wire, the contract; aiohttp).

`app.application` is the HTTP application, `serve.serve` a whole process. `remote-rl serve` is in
`remote_rl.commands.serve`.
"""
