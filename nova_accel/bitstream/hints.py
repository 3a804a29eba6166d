# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Explain to operators, before a server is built, which images are usable.

Used by nova-accel why, with the credentials of an administrator; nova-compute
does not depend on it.
"""

from collections.abc import Mapping
import tempfile
import typing
import uuid

from nova_accel.bitstream import gbs
from nova_accel.bitstream import glance
from nova_accel.bitstream import xclbin
from nova_accel import model
from nova_accel import request as accel_request
from nova_accel import text

#: vendor in the traits of a region -> parser of its bitstreams
_PARSERS = {'INTEL': gbs.parse, 'XILINX': xclbin.parse}


def header(client, image: glance.Image, vendor: str,
           ) -> model.Bitstream | None:
    """Parse the first MiB of an image, without downloading the rest.

    :param vendor: vendor in the traits of the region.
    :returns: the bitstream, or None if this vendor's format is unknown here.
    :raises BitstreamError: the file is not usable for the region, or Glance
        refused the request.
    :raises IncompatibleBitstream: the file is for FPGAs of another vendor.
    :raises GlanceUnavailable: Glance did not answer.
    """
    if vendor not in _PARSERS:
        return None
    with tempfile.NamedTemporaryFile() as file:
        file.write(glance.head(client, image))
        # append a hole, because parsers compare offsets with the size
        if image.size:
            file.truncate(image.size)
        file.flush()
        return _PARSERS[vendor](file.name, str(image))


def not_counted(client, wanted: accel_request.AcceleratorRequest,
                project_id: str) -> str:
    """Explain why no image of Glance serves a request.

    :param client: a client with credentials that can see the images of all
        projects.
    :returns: sentences for the operator, or '' if no reason is found.
    """
    found: dict[str, Mapping[str, typing.Any]] = {}
    for choice in wanted.choices:
        for filters in _filters(choice):
            for hidden in 'false', 'true':
                found.update((r['id'], r) for r in glance.listed(
                    client, {**filters, 'os_hidden': hidden}))
    if not found and (wanted.function_id or wanted.function_name):
        return ('No image in Glance has it: upload one, and make it public or '
                'add its project to [accel] bitstream_owners.')
    said = [_why_not(entry, project_id) for entry in found.values()]
    return ' '.join(filter(None, said))


def _filters(choice):
    if choice.function_id:
        dashed = str(uuid.UUID(choice.function_id))
        for spelling in dashed, dashed.upper():
            yield {glance.FUNCTION_ID: spelling}
    elif choice.function_name:
        yield {glance.FUNCTION_NAME: choice.function_name}


def _why_not(entry, project_id) -> str:
    named = f'Image {entry["id"]} ({text.printable(entry.get("name"))})'
    if entry.get('os_hidden'):
        return (f'{named} has it and is hidden: openstack image set --unhidden '
                f'{entry["id"]}.')
    if (glance.origin(entry) != model.OPERATOR
            and entry.get('owner') != project_id):
        return (f'{named} has it and is {entry.get("visibility")}, of the '
                f'project {entry.get("owner")}: make it public, or add the '
                f'project to [accel] bitstream_owners.')
    return ''


def vendor_of(traits) -> str:
    """Return the FPGA vendor in the traits of a region, or '' if the traits
    show no vendor."""
    return next((vendor for vendor in _PARSERS
                 if f'CUSTOM_FPGA_{vendor}' in traits), '')
