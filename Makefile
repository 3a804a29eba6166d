# make demo   the whole story on simulated hosts, in a minute; STEP=1: by steps
# make test   what each change has to pass; parts of it: style unit host
#             functional, and make unit TEST=tests.unit.test_gbs for one test
# make functional-rest  the other functional tests, which .ci/run runs too
# make soak   random operations on a cloud, SOAK_MINUTES=60 of them
# make explore  random orders of events on one host, EXPLORE_MINUTES=60 of them
# make faults  each call that leaves nova-compute fails, in each operation
# make mutants  small changes of the code that the tests must notice; minutes
# make killed  kill nova-compute at each point of each operation, and its own
#             main() where Nova and we have done half; minutes
# make sigterm  stop nova-compute under load, STOPS=200 times
# make style  flake8, the import floors and the types
# make docs   the pages of docs/source, in docs/build/html, and nova-accel(1)
# make nova-tests  Nova's own tests of its libvirt driver, on ours; 30 minutes
# make candidate  the next Nova, SOURCE or a release candidate: how many methods
#             changed, and the unit and functional tests with it; half an hour
# make floor  unit, host and nova-compute's start with the libraries of Nova 31;
#             NOVA=32.2.1 or 33.0.2: with those of that release
# make layouts  nova-compute starts, however Nova and we are installed; as root
#             beside Debian's packages too; minutes
# make bench  figures with counts
# make bench-fleet  a cloud of thousands of hosts; hours
# make bench-reuse  how often a server finds its function loaded
# make release  wheel, sdist and notes of a tagged commit, in dist, both installed
#             in an empty environment and tried; minutes
# make tempest-setup  what make tempest needs, from apt and the package index; once
# make tempest  OpenStack's integration suites, with a device in every server; as
#             root, tens of minutes; SUITES="live vgpu" for some of them
# make buyer  NVIDIA's validation suite for AI clouds, on simulated hosts; fetches
#             it, or takes the checkout SUITE; minutes
# make lab    the same on a real kernel, in a virtual machine; as root; DEMO=1:
#             the story of make demo there

# python3 in the distribution's build, where there is one: operators run Nova with
# it, and tests need an eighth fewer instructions than with pyenv's
PYTHON ?= $(shell p=$$(python3 -c 'import sys; print("/usr/bin/python%d.%d" % \
	sys.version_info[:2])') && $$p -c 'import ensurepip' 2> /dev/null && \
	echo $$p || echo python3)
VENV ?= .venv
# of the releases in tox.ini; another needs a VENV of its own
NOVA ?= 34.0.0
CONSTRAINTS ?= constraints.txt
# or a wheel, sdist or checkout of it
NOVA_IS ?= nova==$(NOVA)
# empty: it may need later ones
LIMITS ?= -c $(CONSTRAINTS)
BIN = $(VENV)/bin
STAMP = $(VENV)/stamp
# errors only: pip warns of each package that a further index does not have
QUIETLY = --quiet --quiet --disable-pip-version-check
PIP = $(BIN)/python -m pip install $(QUIETLY) --no-compile

# else each process that a test starts compiles nova_accel again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test parts style docs unit host functional functional-rest soak explore faults killed sigterm mutants nova-tests \
	nova-tests-part candidate bench bench-part bench-fleet bench-reuse clean lab lab-up lab-test \
	lab-shell lab-down buyer tempest tempest-part tempest-setup tempest-up \
	tempest-test tempest-down

.DEFAULT_GOAL = help

help:
	@sed -n 's/^# //p;/^$$/q' Makefile

demo: $(STAMP)
	@$(BIN)/python -m tests.demo

PARTS = style unit host functional

# two parts at a time
test: $(STAMP)
	@$(BIN)/python -m tests.ci --parts $(VENV)

# for tests/ci.py
parts:
	@echo $(PARTS)

style: $(STAMP)
	@$(BIN)/mypy & types=$$!; $(BIN)/flake8 nova_accel tests \
		&& $(BIN)/lint-imports; floors=$$?; wait $$types && exit $$floors

# the page of release notes reads them from git; without -E the search would have
# the index entries only of pages that changed
docs: $(STAMP)
	@test -x $(BIN)/sphinx-build || \
		$(PIP) -c $(CONSTRAINTS) $(NOVA_IS) -e '.[docs]'
	$(BIN)/sphinx-build -E -W --keep-going -b html docs/source docs/build/html
	$(BIN)/sphinx-build -W -q -b man docs/source docs/build/man
	$(BIN)/python -m tests.built_pages docs/build/html

# the tests of a folder, or TEST: a module, a class or a test by its name
TEST ?=
# stestr would run them with the PYTHON of the command line, which has no
# packages; and by a shell, for which a whole path may have spaces
RUN = PYTHON=$(BIN)/python $(BIN)/stestr --top-dir . --repo-url build/stestr
define run
	$(if $(TEST),$(BIN)/python -m testtools.run $(TEST),\
		$(BIN)/python -m tests.times $@ && \
		$(RUN)/$@ --test-path ./tests/$@ run $(STESTR))
endef
# more processes than cores, because tests wait; but each imports what it may run,
# and a functional one needs ten seconds of processor for what it does only once,
# and 0.6 GB with its Glance
FEW = --concurrency $$(($$(nproc) < 8 ? $$(nproc) + 1 : 8))
unit functional: STESTR = $(FEW)
# tests of host wait longer, for processes that are killed
host: STESTR = --concurrency $$(($$(nproc) < 6 ? 2 * $$(nproc) : 12))
# a class stays in one process: its tests share a cloud
functional: STESTR += --group_regex '([^\.]*\.)*' \
	--exclude-regex '$(KILLED)|$(REST)'

unit: $(STAMP)
	$(run)

# what a compute host decides, without Nova
host: $(STAMP)
	$(run)

functional: $(STAMP)
	$(run)

# make killed has them: each starts nova-compute twice
KILLED = test_killed_compute

# not in make test: modules without a mutant, and without a row in the tables of
# operations
REST = test_(beside_nova|defrag|driver_page|from_nova|guest_devices|guest_runs|healing|mixed|no_valid_host|nothing_held|nvme|operation_fails|providers_purge|random_operations|restart|topology|vgpu)\.
functional-rest: STESTR = $(FEW) --group_regex '([^\.]*\.)*' '$(REST)'
functional-rest: $(STAMP)
	$(BIN)/python -m tests.times functional
	$(RUN)/functional --test-path ./tests/functional run $(STESTR)

# what is asked of another release of Nova each time, see tests/ci.py
FUNCTIONAL_PART = test_(api_expansion|cells|create|from_nova|live_migration|report|scheduler_placement)\.|test_operations\.(Keep|Move)Test
functional-part: STESTR = $(FEW) --group_regex '([^\.]*\.)*' '$(FUNCTIONAL_PART)'
functional-part: $(STAMP)
	$(BIN)/python -m tests.times functional
	$(RUN)/functional --test-path ./tests/functional run $(STESTR)

# minutes; docs/source/contributor/testing.rst says how to play a failure again
SOAK_MINUTES ?= 60

soak: $(STAMP)
	NOVA_ACCEL_SOAK_MINUTES=$(SOAK_MINUTES) $(BIN)/python -m testtools.run \
		tests.functional.test_random_operations \
		tests.functional.$(KILLED).KilledComputeTest.test_moves

# docs/source/contributor/testing.rst says how to play a failure again
EXPLORE_MINUTES ?= 60

explore: $(STAMP)
	NOVA_ACCEL_EXPLORE_MINUTES=$(EXPLORE_MINUTES) $(BIN)/python \
		-m testtools.run tests.host.test_explorer tests.unit.test_uses

# FAULTS=Glance for calls of that name; minutes
FAULTS ?= all

faults: $(STAMP)
	NOVA_ACCEL_FAULTS=$(FAULTS) $(BIN)/python -m testtools.run \
		tests.host.test_faults

# MUTANTS="attach/reconcile.py" for those of a file, of a room or with a text
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants $(MUTANTS)

killed: $(STAMP)
	$(BIN)/python -m testtools.run tests.functional.$(KILLED)
	NOVA_ACCEL_KILLED=all $(BIN)/python -m testtools.run \
		tests.host.test_killed tests.host.test_maintenance

# nova-compute gets SIGTERM under load, STOPS times
STOPS ?= 200

sigterm: $(STAMP)
	$(BIN)/python -W ignore -m tests.functional.sigterm $(STOPS)

# docs/source/contributor/nova-tests.rst; SUITES="unit" for one of them,
# STOCK=--stock for Nova's own driver
nova-tests: $(STAMP)
	$(BIN)/python -m tests.nova $(STOCK) $(SUITES)

nova-tests-part: $(STAMP)
	$(BIN)/python -m tests.nova --part $(STOCK) $(SUITES)

# the newest Nova of the index, or SOURCE: a wheel, sdist or checkout
candidate: $(STAMP)
	$(BIN)/python -m tests.nova.candidate $(SOURCE)

layouts: $(STAMP)
	$(BIN)/python -m testtools.run discover -s tests/layouts -t .

.PHONY: layouts floor

# setup.cfg promises the versions of the oldest Nova; NOVA of another release
# takes those of that one
ifeq ($(origin NOVA),command line)
floor: RELEASE = $(NOVA)
else
floor: RELEASE = 31.0.0
endif
floor: FLOOR = nova$(firstword $(subst ., ,$(RELEASE)))
floor: THEN = VENV=.venv-$(FLOOR) NOVA=$(RELEASE) CONSTRAINTS=constraints-$(FLOOR).txt
floor:
	$(MAKE) unit $(THEN)
	$(MAKE) host $(THEN)
	$(MAKE) functional TEST=tests.layouts.test_wheel $(THEN)

bench: $(STAMP)
	$(BIN)/python -m tests.bench.boot
	$(BIN)/python -m tests.bench.burst
	$(BIN)/python -m tests.bench.candidates
	$(BIN)/python -m tests.bench.capacity
	$(BIN)/python -m tests.bench.closeness
	$(BIN)/python -m tests.bench.commands
	$(BIN)/python -m tests.bench.discover
	$(BIN)/python -m tests.bench.handover
	$(BIN)/python -m tests.bench.hang
	$(BIN)/python -m tests.bench.health
	$(BIN)/python -m tests.bench.near
	$(BIN)/python -m tests.bench.notice
	$(BIN)/python -m tests.bench.providers
	$(BIN)/python -m tests.bench.report
	$(BIN)/python -m tests.bench.weigh
	$(BIN)/python -m tests.bench.whole

# runs each benchmark at its least size, to see that it works; a minute
bench-part: $(STAMP)
	$(BIN)/python -m tests.bench.boot 1
	$(BIN)/python -m tests.bench.burst 1
	$(BIN)/python -m tests.bench.candidates --limit 5 1
	$(BIN)/python -m tests.bench.capacity 20
	$(BIN)/python -m tests.bench.closeness 1
	$(BIN)/python -m tests.bench.commands 1
	$(BIN)/python -W ignore -m tests.bench.fleet --requests 20 20,20,20,3
	$(BIN)/python -W ignore -m tests.bench.fleet --requests 20 --every .01 20,20,20,3
	$(BIN)/python -m tests.bench.discover 200 1
	$(BIN)/python -m tests.bench.handover 1 0
	$(BIN)/python -m tests.bench.hang 3
	$(BIN)/python -m tests.bench.health 8 1
	$(BIN)/python -m tests.bench.near --hosts 90 --jobs 60 --rounds 1
	$(BIN)/python -m tests.bench.notice 2
	$(BIN)/python -m tests.bench.providers 1 4
	$(BIN)/python -m tests.bench.report 1 2
	$(BIN)/python -m tests.bench.reuse --seeds 2 --requests 30
	$(BIN)/python -m tests.bench.weigh 1 1
	$(BIN)/python -m tests.bench.whole --requests 100 --seeds 1

# TRACE="file ..." of requests, see tests/bench/reuse.py; minutes
bench-reuse: $(STAMP)
	$(BIN)/python -m tests.bench.reuse $(TRACE)

# ROWS="hosts,functions,limit,schedulers ..."; hours without
bench-fleet: $(STAMP)
	$(BIN)/python -W ignore -m tests.bench.fleet $(ROWS)

# docs/source/lab.rst; TRIALS="boot shelve" for some of them, DEMO=1 for the
# story of make demo in their place
DEMO ?=
lab:
	@$(PYTHON) -m tests.lab $(if $(DEMO),demo,prove $(TRIALS))

lab-up:
	@$(PYTHON) -m tests.lab up

lab-test:
	@$(PYTHON) -m tests.lab test $(TRIALS)

lab-shell:
	@$(PYTHON) -m tests.lab shell

lab-down:
	@$(PYTHON) -m tests.lab down

# docs/source/contributor/testing.rst; SUITES="live vgpu" for some of them
tempest:
	@$(PYTHON) -m tests.tempest prove $(SUITES)

# tests/tempest/part.txt; not in .ci/run
tempest-part:
	@$(PYTHON) -m tests.tempest prove --part $(SUITES)

tempest-setup:
	@$(PYTHON) -m tests.tempest build

tempest-up:
	@$(PYTHON) -m tests.tempest up $(SUITES)

tempest-test:
	@$(PYTHON) -m tests.tempest test $(SUITES)

tempest-down:
	@$(PYTHON) -m tests.tempest down

# docs/source/buyer.rst; needs Python 3.12 or later, SUITE_PYTHON
SUITE ?=
export SUITE_PYTHON
buyer: $(STAMP)
	@$(BIN)/python -m tests.buyer $(SUITE)

# a fifth of all packages: what tests do not import, and what is machine code
NOT_COMPILED = tests/unit|babel|bs4|dns|docutils|dulwich|jwcrypto|lexers|mypyc?|networkx|numpy|ovs|ovsdbapp|pip|pyparsing|redis|reno|setuptools|sphinx

# the sources are used where they lie; the wheel is a test's business
$(STAMP): setup.cfg pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit("nova_accel needs Python 3.11 or later, and $(PYTHON) is " + sys.version.split()[0] + ": run make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Setting up $(VENV) (a minute or two, once) ...'
	@# all that there are, by two processes: nothing is left to resolve, which
	@# takes as long as to install
	@xargs -P 2 -n 48 $(PIP) --no-deps < $(CONSTRAINTS)
	@$(PIP) --no-deps --no-build-isolation $(LIMITS) $(NOVA_IS) -e .
	@# another Python may need more
	@$(BIN)/python -m pip check > /dev/null || \
		$(PIP) $(LIMITS) $(NOVA_IS) -e '.[test]'
	@# its own loader reads our metrics.yml; the test is skipped without it
	@$(PIP) --no-deps -r constraints-cloudkitty.txt || :
	@# by all processors, and not what no test imports
	@$(BIN)/python -m compileall -q -q -j 0 \
		-x '/($(NOT_COMPILED))/' $(VENV)/lib || :
	@touch $@

.PHONY: release
VERSION = $(shell sed -n 's/^version = //p' setup.cfg)
release: $(STAMP)
	@test -z "$$(git status --porcelain)" || \
		{ echo 'The working tree has changes: commit them first.'; exit 1; }
	@test "$$(git describe --tags --exact-match 2>&1)" = $(VERSION) || \
		{ echo 'setup.cfg has version $(VERSION), and this commit has no tag' \
		'of that name: git tag --sign $(VERSION)'; exit 1; }
	@test -x $(BIN)/reno || $(PIP) -c $(CONSTRAINTS) $(NOVA_IS) -e '.[docs]'
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/python -c 'from setuptools import build_meta as build; \
		build.build_sdist("dist")' > /dev/null
	$(BIN)/reno -q report --version $(VERSION) \
		--output dist/nova_accel-$(VERSION).rst .
	$(BIN)/python -m tests.released dist $(VERSION) --constraint=$(CONSTRAINTS) \
		$(NOVA_IS)

clean:
	rm -rf $(VENV) .tox .stestr build *.egg-info
