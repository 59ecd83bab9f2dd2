"""Reports: one static HTML file from the numbers of one or more runs, readable offline.

``page`` writes the file, ``charts`` draws the curves in it.
"""
