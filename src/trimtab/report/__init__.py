"""Reports: one static HTML file from runs and evaluations, readable offline.

``build`` puts it together: ``runs`` reads folders, ``arms`` groups runs by seed, ``curves``, ``results``, ``cost`` and
``inspector`` make its parts, ``charts`` draws and ``page`` writes the file.
"""
