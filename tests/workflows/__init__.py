"""Tests of machinery_py.workflows."""
