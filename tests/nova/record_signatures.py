# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Record the signatures of Nova that we build on, release by release.

    pip download --no-deps --dest wheels nova==34.0.0
    python -m tests.nova.record_signatures wheels/nova-*.whl

Writes tests/unit/data/nova_signatures.yaml, with which
tests/unit/test_nova_signatures.py compares our code. The wheels are read and
not imported, so that one Python reads all releases.
"""

import ast
from collections.abc import Callable, Iterable, Iterator
import functools
import pathlib
import sys
import tarfile
import zipfile

import yaml

DATA = (pathlib.Path(__file__).parents[1] / 'unit' / 'data' /
        'nova_signatures.yaml')

#: module -> names in it that are recorded; a class with all its methods, or
#: with those after the colon
RECORDED = {
    'nova.virt.driver': ['ComputeDriver'],
    'nova.virt.hardware': [
        'get_mem_encryption_constraint', 'numa_fit_instance_to_host'],
    'nova.virt.libvirt.driver': ['LibvirtDriver', 'libvirt'],
    'nova.virt.libvirt.host': ['Host'],
    'nova.virt.libvirt.guest': ['Guest'],
    'nova.virt.libvirt.config': [
        'LibvirtConfigObject',
        'LibvirtConfigGuestHostdevPCI', 'LibvirtConfigGuestHostdevMDEV',
        'LibvirtConfigGuestController', 'LibvirtConfigGuestCPUMaxPhysAddr',
        'LibvirtConfigGuestPCIeRootPortController',
        'LibvirtConfigGuestDeviceAddressPCI',
        'LibvirtConfigGuest: add_device'],
    'nova.compute.manager': [
        'ComputeManager: _do_build_and_run_instance pre_start_hook',
        'ComputeVirtAPI'],
    'nova.compute.api': [
        'API: create resize live_migrate rebuild snapshot_volume_backed '
        'unshelve _checks_for_create_and_rebuild '
        '_validate_and_build_base_options'],
    'nova.compute.vm_states': ['BUILDING', 'PAUSED', 'SHELVED_OFFLOADED'],
    'nova.conf.scheduler': ['list_opts'],
    'nova.limit.placement': ['_get_usage'],
    'nova.limit.utils': ['should_enforce', 'use_unified_limits'],
    'nova.compute.flavors': ['get_flavor_by_flavor_id'],
    'nova.objects.flavor': ['Flavor: save_extra_specs'],
    'nova.compute.provider_tree': [
        'ProviderData', 'ProviderTree', '_Provider'],
    'nova.compute.pci_placement_translator': [
        'ensure_tracking_was_not_enabled_before'],
    'nova.compute.claims': ['Claim: _test_numa_topology', 'MoveClaim'],
    'nova.compute.resource_tracker': [
        'COMPUTE_RESOURCE_SEMAPHORE',
        'ResourceTracker: instance_claim _move_claim '
        'delete_allocation_for_evacuated_instance'],
    'nova.compute.task_states': [
        'SPAWNING', 'DELETING', 'REBUILDING', 'REBUILD_SPAWNING',
        'REBUILD_BLOCK_DEVICE_MAPPING', 'RESCUING', 'RESIZE_MIGRATING',
        'UNRESCUING'],
    'nova.scheduler.client.report': [
        'SchedulerReportClient', 'report_client_singleton'],
    'nova.scheduler.manager': [
        'SchedulerManager: _select_destinations select_destinations'],
    'nova.scheduler.filters': ['BaseHostFilter'],
    'nova.filters': ['BaseFilter'],
    'nova.scheduler.weights': ['BaseHostWeigher'],
    'nova.weights': ['BaseWeigher'],
    'nova.scheduler.utils': [
        'get_weight_multiplier', 'request_is_rebuild',
        'resources_from_request_spec', 'ResourceRequest: to_querystring'],
    'nova.pci.devspec': ['PciDeviceSpec'],
    'nova.pci.request': ['get_alias_from_config'],
    'nova.pci.whitelist': ['Whitelist'],
    'nova.image.glance': ['GlanceClientWrapper', 'generate_glance_url'],
    'nova.rpc': ['LEGACY_NOTIFIER'],
    'nova.context': [
        'RequestContext: elevated', 'get_admin_context',
        'is_cell_failure_sentinel', 'scatter_gather_skip_cell0'],
    'nova.objects.compute_node': ['ComputeNode: get_by_host_and_nodename'],
    'nova.objects.instance': ['InstanceList: get_by_filters'],
    'nova.objects.request_spec': ['RequestSpec: root_required'],
    'nova.objects.service': ['Service: get_by_compute_host'],
    'nova.servicegroup.api': ['API: __init__ service_is_up'],
    'nova.utils': ['synchronized'],
    'nova.api.validation.extra_specs.base': ['ExtraSpecValidator'],
    'nova.exception': [
        'NovaException: __init__ format_message', 'InvalidRequest',
        'AllocationDeleteFailed', 'BuildAbortException',
        'ComputeResourcesUnavailable',
        'ConsumerAllocationRetrievalFailed',
        'ReshapeFailed', 'ReshapeNeeded',
        'ForbiddenWithAccelerators', 'ImageNotFound',
        'InstanceFaultRollback: __init__',
        'InstanceNotFound', 'InstanceNotRescuable', 'MigrationNotFound',
        'MigrationError', 'MigrationPreCheckError',
        'NoValidHost', 'NotFound', 'RequestFilterFailed',
        'ResourceProviderAllocationRetrievalFailed',
        'ResourceProviderUpdateConflict',
        'TooManyInstances', 'ValidationError'],
}


def signature(function: ast.FunctionDef) -> str:
    """'(self, name=default)', without annotations, decorators before it."""
    kinds = [ast.unparse(d) for d in function.decorator_list]
    # other decorators leave the parameters as they are
    kind = ''.join(f'@{k} ' for k in kinds
                   if k in ('property', 'staticmethod', 'classmethod'))
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f'{kind}({ast.unparse(function.args)})'


def body(function: ast.FunctionDef) -> str:
    """What a function does, without comments and docstring."""
    begin = 1 if ast.get_docstring(function) is not None else 0
    return '\n'.join(map(ast.unparse, function.body[begin:]))


def attributes(definition: ast.ClassDef) -> set[str]:
    """Names that a class, or a method of it on self, assigns."""
    found = set()
    for node in definition.body:
        found |= {name for name, _ in _assigned(node)}
    for node in ast.walk(definition):
        if (isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == 'self'):
            found.add(node.attr)
    return found


def _assigned(node) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    else:
        return
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id, 'attribute'


def record(read: Callable[[str], str],
           describe: Callable[[ast.FunctionDef], str] = signature,
           ) -> dict[str, str]:
    """What one release has of RECORDED.

    :param read: gives the source of a module, by its name.
    :param describe: what is recorded of a function.
    :returns: full name -> signature, 'attribute', or 'class (bases)'. What
        the release lacks is not in it.
    """
    found = {}
    for module, wanted in RECORDED.items():
        names = dict(_split(entry) for entry in wanted)
        for node in _top(_parsed(read(module)).body):
            for name, what in _definitions(node, names, describe):
                found[f'{module}.{name}'] = what
    return found


#: most modules are the same in both of two releases
_parsed = functools.lru_cache(maxsize=None)(ast.parse)


def _top(body):
    """Statements of a module, also those of its try: ... except."""
    for node in body:
        if isinstance(node, ast.Try):
            yield from _top(node.body)
        else:
            yield node


def _split(entry):
    name, _, methods = entry.partition(':')
    return name, methods.split()


def _definitions(node, names, describe) -> Iterator[tuple[str, str]]:
    for name, what in _assigned(node):
        if name in names:
            yield name, what
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name in names:
                yield alias.name, 'attribute'
    if getattr(node, 'name', None) not in names:
        return
    if isinstance(node, ast.FunctionDef):
        yield node.name, describe(node)
    elif isinstance(node, ast.ClassDef):
        bases = ', '.join(ast.unparse(base) for base in node.bases)
        yield node.name, f'class ({bases})'
        methods = {m.name: describe(m) for m in node.body
                   if isinstance(m, ast.FunctionDef)}
        wanted = names[node.name]
        if not wanted:
            methods = dict.fromkeys(attributes(node), 'attribute') | methods
        for name in sorted(methods):
            if not wanted or name in wanted:
                yield f'{node.name}.{name}', methods[name]


def reader(path: pathlib.Path) -> Callable[[str], str]:
    """Return what reads a module of Nova.

    :param path: a wheel, an archive of sources, or a directory that has nova.
    """
    if path.is_dir():
        texts = {str(file.relative_to(path)): file.read_text()
                 for module in RECORDED for name in _files(module)
                 if (file := path / name).is_file()}
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            texts = {name: archive.read(name).decode()
                     for name in archive.namelist() if name.endswith('.py')}
    else:
        with tarfile.open(path) as sources:
            texts = {member.name.partition('/')[2]: file.read().decode()
                     for member in sources if member.name.endswith('.py')
                     and (file := sources.extractfile(member))}

    def read(module):
        return next(texts[name] for name in _files(module) if name in texts)
    return read


def _files(module) -> tuple[str, str]:
    place = module.replace('.', '/')
    return f'{place}.py', f'{place}/__init__.py'


def merged(releases: dict[str, dict[str, str]]) -> dict:
    """Releases side by side: name -> its signature if it is the same in all,
    otherwise {signature: [releases that have it]}."""
    rows = {}
    for name in sorted(set().union(*releases.values())):
        row: dict[str, list[str]] = {}
        for release, found in releases.items():
            if name in found:
                row.setdefault(found[name], []).append(release)
        (what, where), *others = row.items()
        rows[name] = (what if not others and len(where) == len(releases)
                      else row)
    return {'releases': list(releases), 'names': rows}


def load(path: pathlib.Path = DATA) -> dict[str, dict[str, str]]:
    """The inverse of merged(): release -> name -> signature."""
    with open(path) as file:
        data = yaml.load(file, getattr(yaml, 'CSafeLoader', yaml.SafeLoader))
    releases: dict[str, dict[str, str]] = {r: {} for r in data['releases']}
    for name, row in data['names'].items():
        if isinstance(row, str):
            row = {row: data['releases']}
        for what, where in row.items():
            for release in where:
                releases[release][name] = what
    return releases


def main(paths: Iterable[str]) -> None:
    releases = {}
    for path in sorted(map(pathlib.Path, paths)):
        releases[path.name.split('-')[1]] = record(reader(path))
    DATA.parent.mkdir(exist_ok=True)
    with open(DATA, 'w') as file:
        file.write('# made by python -m tests.nova.record_signatures\n')
        yaml.safe_dump(merged(releases), file, width=2000)


if __name__ == '__main__':
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1:])
