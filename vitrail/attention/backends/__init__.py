"""One module a backend, named in `attention.plan.BACKENDS`, each with a `BACKEND` that implements
`attention.backend.AttentionBackend`. Owns how a plan is computed; decides nothing that the plan has
decided, and never replaces it."""
