# make demo     three unmodified CLIs do a task each, in Docker or on this machine  [ENGINE=scripted|vllm]
# make test     the whole test-suite, with everything it needs
# make check    the quick inner loop: lint, types, and the tests that need neither network nor containers
#               nor a whole deployment
# make bench    what calls and long sessions cost, one JSON object a line           [ONLY=prefix,prefix]
# make clean    remove the virtual environment and what tools left behind

ENGINE ?= scripted
ONLY ?=
.PHONY: demo test check bench clean

demo:
	@began=$$(date +%s) && scripts/setup.sh && \
	exec .venv/bin/python examples/demo/demo.py --engine $(ENGINE) --setup-began $$began

test:
	@scripts/setup.sh dev && exec scripts/test.sh

check:
	@scripts/setup.sh dev
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@.venv/bin/python -m pytest -q -n 4 --hypothesis-profile=quick -m "not docker and not clis and not vllm" --ignore=tests/integration --ignore=tests/polar_client/test_cli_services.py

bench:
	@scripts/setup.sh dev
	@.venv/bin/python -m benchmarks $(if $(ONLY),--only $(ONLY))

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
