# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel profile describe: describe accelerators of flavors for
dashboards.
"""

import collections
from collections.abc import Iterable

from nova_accel.cmd import configuration
from nova_accel.cmd import fits
from nova_accel import exception
from nova_accel import naming
from nova_accel import near
from nova_accel import request


class DescribeFlavors(fits.OfFlavors):
    """Describe the accelerators of flavors, for Horizon and Skyline.

    Writes the description that Horizon and openstack flavor show, and the extra
    specs :architecture and :category by which Skyline sorts flavors, if they
    are missing; --replace also replaces present ones. Uses the credentials of
    the openstack command. Run it on a host with the device profiles of
    nova-api.
    """

    COLUMNS = 'Flavor', 'Description', 'Category', 'Result'

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--replace', action='store_true',
            help='also replace existing descriptions and categories')
        parser.add_argument(
            '--dry-run', action='store_true', help='change nothing')
        return parser

    def table(self, parsed_args):
        configuration.read(parsed_args.config_file, configuration.API)
        self.nothing = 'No flavor asks for accelerators.'
        cloud, found = self.cloud(parsed_args), []
        for flavor, question in fits.questions(cloud, parsed_args.flavors):
            if isinstance(question, exception.InvalidRequest):
                found.append((flavor['name'], '', '',
                              f'nova-api refuses it: {question}'))
                continue
            wanted = question.server.requests
            description, specs = _described(
                wanted, question.server.affinity.levels), {
                ':architecture': 'heterogeneous_computing',
                ':category': _category(wanted)}
            if not parsed_args.replace:
                description = flavor.get('description') or description
                specs = {**specs, **{
                    key: value for key, value in flavor['extra_specs'].items()
                    if key in specs}}
            result = 'planned'
            if not parsed_args.dry_run:
                result = ('written' if cloud.set_flavor(
                    flavor, specs, description) else 'was so')
            found.append((flavor['name'], description, specs[':category'],
                          result))
        return self.COLUMNS, found


def _described(wanted: Iterable[request.AcceleratorRequest],
               levels: Iterable[near.Level]) -> str:
    """Return the devices of a flavor as text, such as 2 GPU NVIDIA H200."""
    found: collections.Counter[str] = collections.Counter()
    for one in wanted:
        type_ = naming.type_of(one.resource_class)
        prefix = f'CUSTOM_{type_}_'
        names = sorted(trait.removeprefix(prefix).replace('_', ' ')
                       for trait in one.required if trait.startswith(prefix)
                       and not naming.is_volatile(trait))
        functions = [choice.function_name or choice.function_id
                     for choice in one.choices if choice.programs]
        found[' '.join(filter(None, (
            type_, *names, 'with ' + ' or '.join(map(str, functions))
            if any(functions) else '')))] += one.amount
    wishes = ', '.join(
        f'{level.name} {"required" if level.required else "preferred"}'
        for level in levels)
    return ', '.join(f'{amount} {what}' for what, amount in found.items()) + (
        f'; servers near each other: {wishes}' if wishes else '')


def _category(wanted: Iterable[request.AcceleratorRequest]) -> str:
    """Return the category of a flavor in Skyline (flavorCategoryList of
    skyline-console)."""
    types = {naming.type_of(one.resource_class) for one in wanted}
    if 'VGPU' in types:
        return 'visualization_compute_optimized_type_with_gpu'
    return ('compute_optimized_type_with_gpu' if types & {'GPU', 'PGPU'}
            else 'compute_optimized_type')
