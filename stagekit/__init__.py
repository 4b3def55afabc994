"""stagekit: cut a model into pipeline stages and train them. See api.py for the surface; names load lazily (PEP 562)."""
