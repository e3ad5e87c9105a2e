"""The checks of `doctor`: each looks at one thing and gives findings, or none where all is well."""
