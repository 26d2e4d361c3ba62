"""The one part that is compiled, and that the package does without where it cannot be (see pyproject.toml for the rest)."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension("paragrad.core._kernels", ["src/paragrad/core/kernels.c"], extra_compile_args=["-O3"], optional=True),
    ]
)
