"""The compiled core, and the mapping that ships migrations/ as awa._migrations."""

from Cython.Build import cythonize
from setuptools import Extension, find_packages, setup

setup(
    # build_dir: the generated C goes to build/, not beside its source.
    ext_modules=cythonize([Extension("awa._core", ["awa/_core.pyx"])], build_dir="build"),
    packages=[*find_packages(include=["awa", "awa.*"]), "awa._migrations"],
    package_dir={"awa._migrations": "migrations"},
    py_modules=["pytest_awa"],
)
