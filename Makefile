# Each target is one command of scripts/; `python3 scripts/run.py COMMAND --help` lists its options, ARGS passes them.
PYTHON ?= python3
RUN := $(PYTHON) scripts/run.py

.DEFAULT_GOAL := help
.PHONY: help source patches check-patches lint wheel test expectations fuzz parity

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

source: ## fill third_party/pytorch: pinned sources, one commit a patch
	@$(RUN) source $(ARGS)

patches: ## export the commits of third_party/pytorch to patches/
	@$(RUN) patches $(ARGS)

check-patches: ## check the series against the pinned sources
	@$(RUN) check-patches $(ARGS)

lint: ## check the scripts, the tests and the patches by themselves
	@$(RUN) lint $(ARGS)

wheel: ## relink the release wheel with the series into dist/
	@$(RUN) wheel $(ARGS)

test: ## run the project's tests and upstream's on the wheel in dist/
	@$(RUN) test $(ARGS)

fuzz: ## run the random-graph test for long
	@$(RUN) fuzz $(ARGS)

parity: ## run the property's tests on torch 2.15.0 as well
	@$(RUN) parity $(ARGS)

expectations: ## record what the unpatched release does in upstream's tests
	@$(RUN) expectations $(ARGS)
