"""What every notebook owes its readers, on any page that shows it."""

import nbformat

LARGEST = 400_000  #: bytes of a file that pages still show


def shown(notebook):
    """All outputs with data."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output for output in outputs if "data" in output]


def must_read_well(notebook):
    """Every output has a form for every page: no live widget, a text beside HTML, an alternative beside a picture."""
    for output in shown(notebook):
        assert not [kind for kind in output.data if "widget" in kind]
        assert "text/plain" in output.data
        if "image/png" in output.data:
            assert len(output.metadata["image/png"]["alt"]) > 40
    assert any("text/html" in output.data for output in shown(notebook))
    assert not [
        output for cell in notebook.cells for output in cell.get("outputs", []) if "stderr" == output.get("name")
    ]


def must_be_kept_whole(path):
    """A file with the outputs of one run from top to bottom; gives its notebook."""
    assert path.stat().st_size < LARGEST
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    must_read_well(notebook)
    counts = [cell.execution_count for cell in notebook.cells if "code" == cell.cell_type]
    assert list(range(1, len(counts) + 1)) == counts
    assert "widgets" not in notebook.metadata
    return notebook
