"""Sphinx configuration."""

import importlib.metadata

project = "jsparse"
author = "The jsparse authors"
copyright = "The jsparse authors"
release = importlib.metadata.version("jsparse")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
html_theme = "furo"
html_title = "jsparse"
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_type_aliases = {"ArrayLike": "ArrayLike", "CommLike": "CommLike"}
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
