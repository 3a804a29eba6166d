# Licensed under the Apache License, Version 2.0. See LICENSE.

import configparser
import pathlib
import re

from docutils import nodes

_setup = configparser.ConfigParser()
_setup.read(pathlib.Path(__file__).parents[2] / 'setup.cfg')

project = 'nova_accel'
author = 'the authors of nova_accel'
copyright = author
#: setup.cfg is the only place that has it
version = release = _setup['metadata']['version']
extensions = ['cliff.sphinxext', 'oslo_config.sphinxext', 'reno.sphinxext',
              'sphinx.ext.autodoc', 'sphinx_copybutton']
autodoc_typehints = 'description'
autodoc_typehints_description_target = 'documented_params'
autoprogram_cliff_app_dist_name = 'nova_accel'
master_doc = 'index'
# dashes of options stay what they are
smartquotes_action = 'qe'
html_theme = 'furo'
html_title = f'nova_accel {version}'
html_static_path = ['_static']
html_css_files = ['phone.css']
man_pages = [('reference', 'nova-accel',
              'show and manage the accelerators of compute hosts', author, 1)]
# most blocks are configuration or output
highlight_language = 'text'
copybutton_prompt_text = r'\$ |# '
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = '\\'


def _link_pages(app, relative_path, parent_docname, content):
    """Turn the README's paths of pages, for a forge, into links of the site.
    """
    content[0] = re.sub(r'`([^`<]+) <docs/source/([\w/-]+)\.rst>`_',
                        r':doc:`\1 </\2>`', content[0])
    content[0] = content[0].replace('image:: docs/source/', 'image:: /')
    content[0] = content[0].replace(
        '`Contributing <CONTRIBUTING.rst>`_',
        ':doc:`/contributor/contributing`')
    content[0] = re.sub(r'`[^`<]+ <(\w+)\.rst>`_', r'``\1.rst``', content[0])


def _name_version(app, doctree):
    """reno calls 0.0.0 what comes before the first tag."""
    for title in doctree.findall(nodes.title):
        if title.astext() == '0.0.0':
            title.children[:] = [nodes.Text(f'{version}, not released yet')]


def setup(app):
    app.connect('include-read', _link_pages)
    app.connect('doctree-read', _name_version)
