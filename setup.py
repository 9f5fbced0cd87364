"""Packaging: the import names are draftgather, draftgather.kernels and draftgather.bench."""

from setuptools import setup

setup(
    packages=["draftgather", "draftgather.kernels", "draftgather.bench"],
    package_dir={
        "draftgather": "assembler",
        "draftgather.kernels": "kernels",
        "draftgather.bench": "bench",
    },
    # What MANIFEST.in names is for the sdist alone.
    include_package_data=False,
    package_data={"draftgather": ["py.typed"]},
    # Without strict mode an editable install cannot find the two subpackages.
    options={"editable_wheel": {"mode": "strict"}},
)
