# Each target makes .venv by itself the first time (and again when the requirements change).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo check test docs fuzz test-models test-opacus test-opacus-oldest test-elsewhere test-pythons test-torch-oldest \
	test-torch-newest test-gpu dist emulate lint bench bench-gpu clean

demo: $(READY)
	$(BIN)/python examples/digits.py

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist loadgroup

# The site, in build/site.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

fuzz: $(READY)
	$(BIN)/python -m pytest tests/test_fuzz.py tests/test_fuzz_compiled.py tests/test_fuzz_steps.py --hypothesis-profile=fuzz

# Opacus's own tests: as they are, with dpfast installed, and on dpfast's modules. They build models of torchvision,
# which stays out of .venv because other packages change their ways where it is installed.
test-opacus: $(READY) build/torchvision
	$(BIN)/python tests/run_opacus_tests.py --torchvision build/torchvision

test-opacus-oldest: $(READY) build/torchvision build/opacus-1.5.4
	$(BIN)/python tests/run_opacus_tests.py --torchvision build/torchvision --opacus build/opacus-1.5.4

# Models of other people's packages, in every mode; some twenty minutes. The packages stay out of .venv for the same
# reason, and torch out of their folder. It is named as where packages are: what stands in others is the user's own code,
# whose caches and lists are looked at.
MODELS := build/models/site-packages
WRITE ?=
test-models: $(READY) build/models/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadgroup tests/models --packages=$(MODELS) $(WRITE)

build/models/.ready: $(READY) tests/models/packages.txt
	rm -rf build/models
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(MODELS) \
		--requirement tests/models/packages.txt
	rm -rf $(MODELS)/torchaudio/lib
	touch $@

build/torchvision: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ torchvision==0.29.2

build/opacus-1.5.4: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ opacus==1.5.4

# The kernels' PTX, executed on the CPU, where its emulator lies beside the project: it is no dependency. EMULATE= takes
# all of its cases.
EMULATOR ?= ../shared/emulator
EMULATE ?= --quick
emulate: $(READY)
	@if test ! -f $(EMULATOR)/run.py; then echo "skipped: no emulator at $(EMULATOR)"; else \
		for arch in 80 90; do \
			$(BIN)/python $(EMULATOR)/run.py --arch $$arch $(EMULATE) && \
			$(BIN)/python tests/kernels/emulated.py $(EMULATOR) --arch $$arch || exit 1; \
		done; \
	fi

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# For every edit: lint, types, and the tests that are not slow, with few random cases each. `make test` runs everything.
# A test is slow that takes some seconds; every folder keeps tests that are not (tests/test_packaging.py holds that).
SLOW := tests/arithmetic/test_bounds.py::test_the_kernels_bounds_hold_too \
	tests/compiled/test_certificate.py \
	tests/compiled/test_guards.py::test_another_shape_dtype_flag_or_clipper_is_captured_again \
	tests/compiled/test_in_turn.py \
	tests/compiled/test_kernels.py \
	tests/compiled/test_models.py \
	tests/compiled/test_units.py \
	tests/distributed/test_ddp.py \
	tests/distributed/test_fsdp.py \
	tests/distributed/test_fsdp_and_tensor_parallel.py \
	tests/distributed/test_in_turn.py \
	tests/distributed/test_killed.py \
	tests/distributed/test_odd_tensor_parallel.py \
	tests/opacus/test_compiled.py \
	tests/distributed/test_tensor_parallel.py \
	tests/distributed/test_tp_plan.py \
	tests/distributed/test_units.py \
	tests/opacus/test_checkpoint.py \
	tests/opacus/test_ddp.py \
	tests/arithmetic/test_ops.py::test_verbs_equal_fp64 \
	tests/examples/ \
	tests/factors/test_in_runs.py \
	tests/factors/test_waiting.py \
	tests/holes/test_install.py::test_norms_over_many_small_layers \
	tests/holes/test_platforms.py::test_onednn_told_by_the_environment_to_round_its_operands \
	tests/holes/test_released_sum.py::test_p_grad_of_16_bit_parameters \
	tests/kernels/test_ahead.py \
	tests/kernels/test_gram_norm.py \
	tests/kernels/test_grouped_norm.py \
	tests/kernels/test_lookup_norm.py \
	tests/kernels/test_offsets.py \
	tests/kernels/test_outer_norm.py \
	tests/kernels/test_outer_product.py \
	tests/kernels/test_rows.py \
	tests/kernels/test_runs.py \
	tests/kernels/test_traffic.py \
	tests/kernels/test_weighted_sum.py \
	tests/models/test_models.py::test_model \
	tests/modes/test_in_turn.py::test_explain_names_the_layers_that_a_step_takes_in_turn \
	tests/modes/test_in_turn.py::test_the_sums_of_a_loop_over_samples \
	tests/modes/test_memory.py \
	tests/test_site.py \
	tests/modes/test_models.py \
	tests/opacus/test_distributed.py \
	tests/opacus/test_engine.py::test_make_private_with_epsilon \
	tests/opacus/test_samplers.py::test_opacus_missing \
	tests/opacus/test_trainer.py \
	tests/report/test_info.py \
	tests/report/test_measure.py::test_what_is_predicted_is_what_a_step_then_takes \
	tests/rules/test_families.py \
	tests/test_scale.py::test_every_leg_is_right_and_timed \
	tests/test_scale.py::test_four_ranks_send_and_hold_what_the_paper_says \
	tests/test_scale.py::test_two_ranks_send_and_hold_what_the_paper_says \
	tests/test_scale.py::test_what_the_private_step_sends_more \
	tests/test_benchmarks.py::test_rounds_come_from_processes_of_their_own \
	tests/test_benchmarks.py::test_the_kernel_table_writes_every_cell_once \
	tests/test_benchmarks.py::test_the_parts_run \
	tests/test_benchmarks.py::test_what_is_worth_most_comes_first_and_is_not_measured_again \
	tests/test_docs.py::test_python_examples_run \
	tests/looks/test_layout.py \
	tests/looks/test_layout_models.py \
	tests/looks/test_picks.py \
	tests/test_benchmarks.py::test_smoke_runs_every_kernel \
	tests/test_fuzz.py \
	tests/test_fuzz_compiled.py \
	tests/test_fuzz_steps.py \
	tests/test_packaging.py::test_wheel_holds_every_source_file

check: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadgroup --hypothesis-profile=check $(SLOW:%=--deselect=%)

# The tests that are not slow, in an environment of its own with another Python or another torch. Some gigabytes each where
# torch comes with its libraries for a GPU; `make clean` removes them.
TORCH ?= 2.13.0
ELSEWHERE = build/elsewhere/$(notdir $(PYTHON))-torch-$(or $(TORCH),newest)
test-elsewhere:
	test -x $(ELSEWHERE)/bin/python || $(PYTHON) -m venv $(ELSEWHERE)
	$(ELSEWHERE)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --editable \
		'.[opacus,test,bench,docs,examples]' torch$(TORCH:%===%) $(WITH)
	OMP_NUM_THREADS=1 $(ELSEWHERE)/bin/python -m pytest -q -p no:cacheprovider --hypothesis-profile=check \
		$(SLOW:%=--deselect=%)

# Its Triton's interpreter does not run with newer NumPy.
test-torch-oldest:
	$(MAKE) test-elsewhere TORCH=$(shell sed -n 's/^ *"torch>=\(.*\)",/\1/p' pyproject.toml) WITH="'numpy<2.4'"

test-torch-newest:
	$(MAKE) test-elsewhere TORCH=

# Those of the Pythons that are on this machine.
PYTHONS ?= python3.10 python3.11 python3.12 python3.13 python3.14
test-pythons:
	@for python in $(PYTHONS); do \
		if $$python --version > /dev/null 2>&1; then $(MAKE) test-elsewhere PYTHON=$$python || exit 1; \
		else echo "$$python: not on this machine"; fi; \
	done

# Wheel and sdist in dist/: built, their metadata checked, and each installed where nothing else is, where it must train.
dist: build/release/.ready
	rm -rf dist build/lib build/bdist.* build/installed
	build/release/bin/python -m build --no-isolation --outdir dist
	build/release/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/installed
	for made in dist/*.whl dist/*.tar.gz; do \
		build/installed/bin/python -m pip uninstall --quiet --yes dpfast; \
		build/installed/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
			$$made && \
		build/installed/bin/python -I tests/installed.py || exit 1; \
	done

build/release/.ready: pyproject.toml
	test -x build/release/bin/python || $(PYTHON) -m venv build/release
	build/release/bin/python -m pip install --quiet --disable-pip-version-check 'setuptools>=77' 'build>=1.2' 'twine>=6'
	touch $@

# FASTDP=PATH: the sources of fast-differential-privacy, whose leg is measured too.
FASTDP ?=
bench: $(READY)
	$(BIN)/python -m pytest benchmarks --benchmark-only
	$(BIN)/python benchmarks/step.py $(if $(FASTDP),--fastdp $(FASTDP))
	$(BIN)/python benchmarks/report.py

# For a machine with a GPU and the packages already there: nothing is installed, nothing fetched. `kernels/` stands beside
# `dpfast/` in the sources and inside it where it is installed, so the sources are copied together. What is worth most
# comes first, on any GPU; run it again for the rest.
# make bench-gpu PART=kernels BUDGET=460 OUT=benchmarks/results
PART ?= all
BUDGET ?= 540
OUT ?= benchmarks/results
bench-gpu:
	rm -rf build/bench-gpu
	mkdir -p build/bench-gpu
	cp -R dpfast build/bench-gpu/dpfast
	cp -R kernels build/bench-gpu/dpfast/kernels
	PYTHONPATH=$(CURDIR)/build/bench-gpu $(PYTHON) benchmarks/gpu.py --part $(PART) --budget-seconds $(BUDGET) --out $(OUT)

# The tests, standing on that machine's GPU: what they make is made there. Installs and fetches nothing either; Opacus's
# tests run where it is installed. With TESTS=tests/taps only those.
TESTS ?= tests/modes tests/rules tests/factors tests/taps tests/trials tests/looks tests/arithmetic tests/holes tests/compiled tests/opacus tests/kernels
test-gpu:
	rm -rf build/bench-gpu
	mkdir -p build/bench-gpu
	cp -R dpfast build/bench-gpu/dpfast
	cp -R kernels build/bench-gpu/dpfast/kernels
	PYTHONPATH=$(CURDIR)/build/bench-gpu DPFAST_TEST_DEVICE=cuda OMP_NUM_THREADS=1 \
		$(PYTHON) -m pytest -q -n 8 --hypothesis-profile=check $(TESTS)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[opacus,test,bench,docs,examples]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
