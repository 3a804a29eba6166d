# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Our code against the signatures of each release of Nova.

They are recorded in data/nova_signatures.yaml (tests.nova.record_signatures),
so that one installed Nova is enough to compare with all.
"""

import ast
import importlib.util
from importlib import metadata
import inspect
import os
import pathlib
import re
import shutil
import textwrap

import fixtures
import nova
from nova.compute import api as compute_api
import testtools

import nova_accel
from nova_accel.api import expansion
from nova_accel.scheduler import filters
from nova_accel.scheduler import seam
from nova_accel.scheduler import weights
from nova_accel.virt import driver
from nova_accel.virt import errors
from nova_accel.virt import guest_nodes
from nova_accel.virt import provider_trees
from nova_accel.virt import report_client
from tests.nova import candidate
from tests.nova import record_signatures
from tests.unit import pages

RELEASES = record_signatures.load()
if candidate.CANDIDATE in os.environ:
    RELEASES['candidate'] = record_signatures.record(record_signatures.reader(
        pathlib.Path(os.environ[candidate.CANDIDATE])))
#: name that our code gives an object of Nova -> its class, and whether every
#: object of that name is one
RECEIVERS = {
    '_driver': ('nova.virt.libvirt.driver.LibvirtDriver', True),
    '_host': ('nova.virt.libvirt.host.Host', True),
    'virtapi': ('nova.compute.manager.ComputeVirtAPI', True),
    'reportclient': (
        'nova.scheduler.client.report.SchedulerReportClient', True),
    '_placement': (
        'nova.scheduler.client.report.SchedulerReportClient', True),
    'client': ('nova.scheduler.client.report.SchedulerReportClient', False),
    'driver': ('nova.virt.libvirt.driver.LibvirtDriver', False),
    'guest': ('nova.virt.libvirt.guest.Guest', False),
    '_provider_tree': ('nova.compute.provider_tree.ProviderTree', True),
    'provider_tree': ('nova.compute.provider_tree.ProviderTree', False),
    'tree': ('nova.compute.provider_tree.ProviderTree', False),
    'manager': ('nova.compute.manager.ComputeManager', False)}
BASES = {'nova.virt.libvirt.driver.LibvirtDriver':
         'nova.virt.driver.ComputeDriver'}
#: overrides of which Nova passes all by position; Nova's own have other names
#: for the parameters, too
BY_POSITION = ('_weigh_object',)
#: parameters that we read by name
READ = {'nova.compute.manager.ComputeManager._do_build_and_run_instance':
        ('instance', 'host_list'),
        # SchedulerAPI passes them by name (31 to 34)
        'nova.scheduler.manager.SchedulerManager.select_destinations':
        ('context', 'spec_obj', 'instance_uuids'),
        'nova.scheduler.manager.SchedulerManager._select_destinations':
        ('self', 'context', 'spec_obj', 'instance_uuids',
         'alloc_reqs_by_rp_uuid', 'provider_summaries'),
        # called without arguments
        'nova.scheduler.utils.ResourceRequest.to_querystring': ('self',),
        'nova.compute.resource_tracker.ResourceTracker.instance_claim':
        ('allocations',),
        'nova.compute.resource_tracker.ResourceTracker.'
        'delete_allocation_for_evacuated_instance':
        ('context', 'instance', 'node_type'),
        'nova.compute.resource_tracker.ResourceTracker._move_claim':
        ('allocations',),
        'nova.compute.claims.Claim._test_numa_topology':
        ('self', 'compute_node', 'limit')}
#: modules of Nova whose names come to be while it runs
DYNAMIC = ('nova.objects',)


def _parameters(signature):
    """ast.arguments of a recorded signature."""
    return ast.parse(f'def f{signature[signature.index("("):]}: pass'
                     ).body[0].args


def _defaults(arguments):
    """Names of all named parameters in order -> default as text, or None."""
    places = arguments.posonlyargs + arguments.args
    values = [None] * (len(places) - len(arguments.defaults)) + [
        ast.unparse(d) for d in arguments.defaults]
    named = dict(zip((p.arg for p in places), values))
    named.update({p.arg: d and ast.unparse(d) for p, d in zip(
        arguments.kwonlyargs, arguments.kw_defaults)})
    return named


def not_accepted(ours: inspect.Signature, recorded: str,
                 by_position: bool = False) -> list[str]:
    """What Nova may pass to a method and our override of it does not take.

    :param by_position: Nova passes all by position, whatever the names.
    """
    theirs = _parameters(recorded)
    if by_position:
        for argument, name in zip(theirs.args, ours.parameters):
            argument.arg = name
    kinds = {kind: [p.name for p in ours.parameters.values()
                    if p.kind is kind] for kind in inspect._ParameterKind}
    places = (kinds[inspect.Parameter.POSITIONAL_ONLY]
              + kinds[inspect.Parameter.POSITIONAL_OR_KEYWORD])
    rest = kinds[inspect.Parameter.VAR_POSITIONAL]
    other = kinds[inspect.Parameter.VAR_KEYWORD]
    named = set(places + kinds[inspect.Parameter.KEYWORD_ONLY])
    wrong = []
    for place, argument in enumerate(theirs.posonlyargs + theirs.args):
        if place < len(places):
            if places[place] != argument.arg and argument.arg != 'self':
                wrong.append(f'{places[place]} is where Nova has '
                             f'{argument.arg}')
        elif not rest:
            wrong.append(f'{argument.arg} by position')
    defaults = _defaults(theirs)
    for name, default in defaults.items():
        if name not in named:
            if not other and name != 'self':
                wrong.append(f'{name} by name')
        elif default is not None and default != repr(
                ours.parameters[name].default):
            wrong.append(f'the default of {name} is {default} with Nova')
    wrong += [f'{p.name} is required, and Nova does not have it'
              for p in ours.parameters.values()
              if p.default is p.empty and p.name not in defaults
              and p.name != 'self'
              and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if theirs.vararg and not rest or theirs.kwarg and not other:
        wrong.append('any further arguments')
    return wrong


def not_callable(call: ast.Call, recorded: str) -> list[str]:
    """Why a call as it stands in our code does not fit a signature."""
    theirs = _parameters(recorded)
    places = [p.arg for p in theirs.posonlyargs + theirs.args]
    if not recorded.startswith('@staticmethod') and places[:1] in (
            ['self'], ['cls']):
        del places[0]
    given = [a for a in call.args if not isinstance(a, ast.Starred)]
    names = {k.arg for k in call.keywords if k.arg}
    open_ended = (len(given) < len(call.args)
                  or any(k.arg is None for k in call.keywords))
    defaults = _defaults(theirs)
    wrong = []
    if len(given) > len(places) and not theirs.vararg:
        wrong.append(f'takes {len(places)} arguments by position')
    wrong += [f'has no {name}' for name in sorted(names - defaults.keys())
              if not theirs.kwarg]
    filled = set(places[:len(given)]) | names
    wrong += [f'needs {name}' for name, default in defaults.items()
              if default is None and name not in filled
              and name not in ('self', 'cls') and not open_ended]
    return wrong


def _full_name(of):
    return f'{of.__module__}.{of.__qualname__}'


def _bases(ours):
    """Full names of the classes of Nova that one of ours is made of."""
    known = set().union(*RELEASES.values())
    return [name for name in map(_full_name, ours.__mro__) if name in known]


def _own_classes(ours):
    return [c for c in ours.__mro__ if c.__module__.startswith('nova_accel.')]


def _own(ours):
    """Name -> what one of our classes has that is not Nova's."""
    return {name: value for c in reversed(_own_classes(ours))
            for name, value in vars(c).items()}


def _of(release, bases, name):
    """What the first of some classes has by a name, or None."""
    return next((RELEASES[release][f'{base}.{name}'] for base in bases
                 if f'{base}.{name}' in RELEASES[release]), None)


def _class_tree(of):
    return ast.parse(textwrap.dedent(inspect.getsource(of))).body[0]


def _sources():
    root = pathlib.Path(nova_accel.__file__).parent
    return {path.relative_to(root.parent): ast.parse(path.read_text())
            for path in sorted(root.rglob('*.py'))}


def _modules_of_nova(tree):
    """Name in a source file -> module of Nova."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (
                node.module or '').split('.')[0] == 'nova':
            found.update({a.asname or a.name: f'{node.module}.{a.name}'
                          for a in node.names})
    return found


def _calls(tree):
    """Attribute that is called -> the call."""
    return {call.func: call for call in ast.walk(tree)
            if isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)}


def _attributes(tree):
    return [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]


class SignatureTest(testtools.TestCase):

    maxDiff = None

    def check(self, wrong):
        self.assertEqual([], sorted(set(wrong)))

    def test_installed_nova_is_the_one_that_was_recorded(self):
        installed = metadata.version('nova')
        if installed not in RELEASES:
            self.skipTest(f'Nova {installed} is not recorded')

        def read(module):
            return pathlib.Path(
                importlib.util.find_spec(module).origin).read_text()
        self.assertEqual(RELEASES[installed], record_signatures.record(read))

    def test_overrides_take_what_nova_passes(self):
        wrong = []
        for ours in (driver.AccelLibvirtDriver, filters.AcceleratorFilter,
                     weights.AcceleratorWeigher):
            bases = _bases(ours)
            overrides = {name: value for name, value in _own(ours).items()
                         if any(_of(r, bases, name) for r in RELEASES)}
            self.assertTrue(overrides)
            for name, value in overrides.items():
                for release in RELEASES:
                    theirs = _of(release, bases, name)
                    if theirs is None or not theirs.startswith(
                            ('(', '@staticmethod', '@classmethod')):
                        continue
                    value = inspect.unwrap(
                        getattr(value, '__func__', value))
                    wrong += [
                        f'{ours.__name__}.{name} with Nova {release}: {why}'
                        for why in not_accepted(
                            inspect.signature(value), theirs,
                            name in BY_POSITION)]
        self.check(wrong)

    def test_page_has_all(self):
        """What the page on the architecture says that runs otherwise."""
        text = (pages.ROOT / 'docs/source/contributor/architecture.rst'
                ).read_text().partition('.. _seams:')[2].partition(
                    'The rooms\n')[0]
        shown = {name.rpartition('.')[2] for name in
                 re.findall('``([A-Za-z_.]+)``', text)}
        ours = driver.AccelLibvirtDriver
        bases = _bases(ours)
        overridden = {name for name in _own(ours)
                      if name != '__init__'
                      and any(_of(r, bases, name) for r in RELEASES)}
        wrapped = {name for _, name in expansion.wrapped()}
        assigned = {*re.findall(
            r"wrapping\.wrap\(manager, '([a-z_]+)'", inspect.getsource(driver)
            + inspect.getsource(errors)), driver._DELETE}
        self.assertEqual(3, len(assigned))
        known = {'LibvirtDriver', 'ComputeManager', 'ResourceTracker',
                 'SchedulerManager', 'SchedulerReportClient', 'API',
                 'ProviderTree', '_Provider', 'Flavor', 'numa_affinity'}
        self.assertEqual(
            overridden | wrapped | assigned | {
                *guest_nodes._CLAIMS, guest_nodes._METHOD,
                *report_client.WRAPS,
                *(name for _, name in provider_trees.REPLACED),
                seam._ANSWERED, seam._RPC}, shown - known)

    def test_attributes_of_ours_are_no_attributes_of_nova(self):
        wrong = []
        for ours in (driver.AccelLibvirtDriver, filters.AcceleratorFilter,
                     weights.AcceleratorWeigher):
            names = set().union(*(
                record_signatures.attributes(_class_tree(c))
                for c in _own_classes(ours)))
            # options of a class are there to be set
            names -= _own(ours).keys()
            wrong += [f'{ours.__name__} sets {name}, which Nova {release} has'
                      for name in names for release in RELEASES
                      if _of(release, _bases(ours), name)]
        self.check(wrong)

    def test_wrappers_of_the_api_take_what_nova_passes(self):
        wrong = []
        for (owner, name), ours in expansion.wrapped().items():
            full = (f'{owner.__name__}.{name}' if inspect.ismodule(owner)
                    else f'{_full_name(owner)}.{name}')
            for release, names in RELEASES.items():
                if full not in names:
                    wrong.append(f'{full} is not in Nova {release}')
                    continue
                # the first parameter is the wrapped function
                given = inspect.signature(ours)
                _, *parameters = given.parameters.values()
                wrong += [f'{full} with Nova {release}: {why}'
                          for why in not_accepted(
                              given.replace(parameters=parameters),
                              names[full])]
        self.check(wrong)

    def test_names_of_modules_are_there(self):
        known = set().union(*RELEASES.values())
        wrong = []
        for path, tree in _sources().items():
            modules = _modules_of_nova(tree)
            calls = _calls(tree)
            for node in _attributes(tree):
                if not isinstance(node.value, ast.Name):
                    continue
                module = modules.get(node.value.id)
                # every package has a __path__
                if module is None or module in DYNAMIC or (
                        node.attr == '__path__'):
                    continue
                full = f'{module}.{node.attr}'
                if full not in known:
                    wrong.append(f'{path}: {full} is not recorded')
                    continue
                wrong += self._not_fitting(
                    path, full, calls.get(node),
                    lambda release: RELEASES[release].get(full))
        self.check(wrong)

    def test_what_the_driver_uses_of_itself_is_there(self):
        ours = driver.AccelLibvirtDriver
        bases = _bases(ours)
        wrong = []
        for own in _own_classes(ours):
            tree = _class_tree(own)
            set_by_us = record_signatures.attributes(tree)
            calls = _calls(tree)
            for node in _attributes(tree):
                if isinstance(node.value, ast.Name):
                    if (node.value.id != 'self' or node.attr in set_by_us
                            or node.attr in _own(ours)):
                        continue
                elif not (isinstance(node.value, ast.Call)
                          and isinstance(node.value.func, ast.Name)
                          and node.value.func.id == 'super'):
                    continue
                in_any = any(_of(r, bases, node.attr) for r in RELEASES)
                if isinstance(node.value, ast.Call) and in_any:
                    # where a release lacks it, it does not call ours
                    def find(release):
                        return _of(release, bases, node.attr) or '(*a, **k)'
                else:
                    def find(release):
                        return _of(release, bases, node.attr)
                wrong += self._not_fitting(
                    own.__name__, node.attr, calls.get(node), find)
        self.check(wrong)

    def test_what_we_use_of_objects_of_nova_is_there(self):
        wrong = []
        for path, tree in _sources().items():
            if 'virt' not in path.parts:
                continue
            calls = _calls(tree)
            for node in _attributes(tree):
                receiver = getattr(node.value, 'attr',
                                   getattr(node.value, 'id', None))
                if receiver not in RECEIVERS:
                    continue
                of, always = RECEIVERS[receiver]
                bases = [of, BASES.get(of)]
                if any(_of(r, bases, node.attr) for r in RELEASES):
                    wrong += self._not_fitting(
                        path, f'{of}.{node.attr}', calls.get(node),
                        lambda release: _of(release, bases, node.attr))
                elif always:
                    wrong.append(f'{path}: {of}.{node.attr} is not recorded')
        self.check(wrong)

    def test_parameters_that_we_read_are_there(self):
        self.check(
            f'{full} of Nova {release} has no {name}'
            for full, names in READ.items() for name in names
            for release in RELEASES
            if name not in _defaults(_parameters(RELEASES[release][full])))

    @staticmethod
    def _not_fitting(where, name, call, find):
        for release in RELEASES:
            theirs = find(release)
            if theirs is None:
                yield f'{where}: {name} is not in Nova {release}'
            elif call and theirs.startswith(
                    ('(', '@staticmethod', '@classmethod')):
                for why in not_callable(call, theirs):
                    yield (f'{where}: {name} of Nova {release} {why}, '
                           f'line {call.lineno}')


class CandidateTest(testtools.TestCase):
    """The comparison of the next Nova with this one."""

    def setUp(self):
        super().setUp()
        self.nova = pathlib.Path(nova.__file__).parents[1]
        self.next = pathlib.Path(self.useFixture(fixtures.TempDir()).path)
        for module in record_signatures.RECORDED:
            for name in record_signatures._files(module):
                if (self.nova / name).exists():
                    (self.next / name).parent.mkdir(
                        parents=True, exist_ok=True)
                    shutil.copy(self.nova / name, self.next / name)

    def change(self, name, old, new):
        text = (self.next / name).read_text()
        self.assertIn(old, text)
        (self.next / name).write_text(text.replace(old, new))

    def test_changes(self):
        total, other, bodies = candidate.changes(self.nova, self.next)
        self.assertEqual(([], []), (other, bodies))
        self.assertLess(60, total)
        driver_ = 'nova/virt/libvirt/driver.py'
        self.change(driver_, 'def init_host(self, host)',
                    'def init_host(self, host, context)')
        self.change(driver_, 'def unrescue(', 'def recover(')
        self.change(driver_, '"""Suspend the specified instance."""',
                    '"""Suspend it."""\n        self.suspended = True')
        # only the text
        self.change('nova/scheduler/manager.py', 'def _select_destinations(',
                    'def _select_destinations(  # of all cells')
        self.assertEqual(
            (total, ['init_host', 'unrescue'], ['suspend']),
            candidate.changes(self.nova, self.next))


class CyborgTest(testtools.TestCase):

    def test_what_nova_refuses(self):
        """As README, the comparison and the demo say."""
        tree = ast.parse(inspect.getsource(compute_api))
        self.assertEqual({'suspend', 'resize', 'live_migrate'}, {
            node.name for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and 'block_accelerators()' in
            map(ast.unparse, node.decorator_list)})


class CompareTest(testtools.TestCase):
    """The comparison itself."""

    def not_accepted(self, function, recorded):
        return not_accepted(inspect.signature(function), recorded)

    def test_the_same_is_accepted(self):
        self.assertEqual([], self.not_accepted(
            lambda self, a, b=None, *, c=1: None, '(self, a, b=None, *, c=1)'))

    def test_the_rest_is_accepted(self):
        self.assertEqual([], self.not_accepted(
            lambda self, a, *args, **kwargs: None,
            '(self, a, b, c=None, *, d)'))

    def test_by_position_names_may_differ(self):
        self.assertEqual([], not_accepted(
            inspect.signature(lambda self, host: None), '(self, obj)',
            by_position=True))

    def test_differences_are_named(self):
        for function, recorded, why in (
                (lambda self, b, a: None, '(self, a, b)',
                 ['b is where Nova has a', 'a is where Nova has b']),
                (lambda self, a: None, '(self, a, b=None)',
                 ['b by position', 'b by name']),
                (lambda self, a, *args: None, '(self, a, b=None)',
                 ['b by name']),
                (lambda self, a, **kwargs: None, '(self, a, b=None)',
                 ['b by position']),
                (lambda self, a, b=False: None, '(self, a, b=None)',
                 ['the default of b is None with Nova']),
                (lambda self, a, b: None, '(self, a)',
                 ['b is required, and Nova does not have it']),
                (lambda self, a: None, '(self, a, **kwargs)',
                 ['any further arguments'])):
            with self.subTest(recorded=recorded):
                self.assertEqual(why, self.not_accepted(function, recorded))

    def test_calls(self):
        for call, recorded, why in (
                ('f(1, b=2)', '(self, a, b)', []),
                ('f(1, *rest)', '(self, a, b)', []),
                ('f(1)', '@staticmethod (a)', []),
                ('f(1)', '(self, a, b)', ['needs b']),
                ('f(1, 2)', '(self, a)', ['takes 1 arguments by position']),
                ('f(1, c=2)', '(self, a)', ['has no c'])):
            with self.subTest(call=call):
                self.assertEqual(why, not_callable(
                    ast.parse(call).body[0].value, recorded))
