# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Compares the names of GPUs with a pci.ids file of the PCI ID repository.

``python -m tests.products FILE`` shows the GPUs for data centers and
workstations that nova_accel.drivers.gpu lacks, with what the file
calls them, and the names that the file contradicts. A name is chosen by hand:
it becomes a trait, and stays. ``--golden`` prints
tests/unit/data/products.yaml.
"""

from collections.abc import Iterable, Iterator
import pathlib
import re
import sys

import yaml

from nova_accel.drivers import gpu

GOLDEN = pathlib.Path(__file__).parent / 'unit/data/products.yaml'
#: what such GPUs are called, by vendor
_WANTED = {
    '10de': re.compile(
        r'\[(?:HGX |TS4 / )?(?:Tesla |NVIDIA )?(?:[ABHLT]\d{1,3}[A-Z]?\b'
        r'|AX\d|G[BH]\d{2,3}\b|RTX A?\d{4}|RTX PRO )'),
    '1002': re.compile(
        r'Instinct|AI PRO|Radeon P(?:ro|RO) (?:V\d{3}\b|W7[89])'),
    '8086': re.compile('Data Center GPU|Server GPU|Arc Pro [AB][0-9]')}
#: parts of other products, and kinds that no cloud offers
_OTHERS = re.compile('NVSwitch|Laptop|Mobile|Embedded|Max-Q|MxGPU| VF|DGXS'
                     r'|GRID|DRIVE|Quadro|Arc Pro (?:A30M|A60M|B3[79]0)'
                     r'|RTX A?[1-4]\d{3}H?\b|PRO 2000|T[46]00|T1000'
                     r'|Tesla T20|PG506|88K|GH3')


def products(lines: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield vendor, device and name of each device of a pci.ids file."""
    vendor = ''
    for line in lines:
        if line.startswith('C '):
            # classes follow
            return
        found = re.match('(\t?)([0-9a-f]{4})  (.+)', line)
        if found and found[1]:
            yield vendor, found[2], found[3]
        elif found:
            vendor = found[2]


def missing(lines: Iterable[str]) -> Iterator[str]:
    """Yield a line for each wanted product without a name."""
    known = {*gpu.PRODUCTS,
             *(key[:2] for key in gpu.BOARDS)}
    for vendor, device, name in products(lines):
        wanted = _WANTED.get(vendor)
        if (wanted and wanted.search(name) and not _OTHERS.search(name)
                and (vendor, device) not in known):
            yield f'{gpu.VENDORS[vendor]} {device} has no name: {name}'


def contradicted(lines: Iterable[str]) -> Iterator[str]:
    """Yield a line for each name of which the file has another number."""
    found = {(vendor, device): name
             for vendor, device, name in products(lines)}
    for key, (product, _) in gpu.PRODUCTS.items():
        name = found.get(key, product)
        number = max(re.findall('[0-9]+', product), key=len)
        if re.search(r'\[.*[0-9]', name) and number not in name:
            yield (f'{gpu.VENDORS[key[0]]} {key[1]} is {product} here: {name}')


def golden() -> dict[str, str]:
    """Return '<ids>' -> '<product> <family>' of the tables."""
    return {' '.join((':'.join(key[:2]), *key[2:])): ' '.join(names)
            for key, names in {**gpu.PRODUCTS,
                               **gpu.BOARDS}.items()}


def main(argument: str) -> int:
    if argument == '--golden':
        print(yaml.safe_dump(golden()), end='')
        return 0
    lines = pathlib.Path(argument).read_text(
        encoding='utf-8', errors='replace').splitlines()
    found = [*missing(lines), *contradicted(lines)]
    print('\n'.join(found))
    return bool(found)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1]))
