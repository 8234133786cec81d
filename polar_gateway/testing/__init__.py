"""Parts that stand in for the world in tests, demos and benchmarks; plug-in authors use them too.

`engine.ScriptedEngine` is a model server without a model: a vLLM-shaped HTTP API with a real
tokenizer and a real chat template, which says what a script document tells it to. The same document
makes a real vLLM with a tiny random model (`tiny_model`) say the same.
"""
