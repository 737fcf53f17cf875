"""The report page works in a browser; `test_page_browser.py` tests every control."""


def test_choosing_a_model_updates_all_its_figures(visit, several):
    here = visit(several)
    watched = (
        "#reliability-diagrams",
        "#confidence-histogram",
        "#class-table tbody",
        "#map-figure",
        "#sample-list",
        "#slice-table",
        "#confusion-tables",
    )
    before = {place: here.page.inner_html(place) for place in watched}
    assert here.count("#reliability-states input[type=radio]") == 3
    here.page.select_option("#model", "1")
    for place in watched:
        assert here.page.inner_html(place) != before[place], place
    assert here.count("#reliability-states input[type=radio]") == 2
    for section in ("#ood", "#norms", "#training"):  # this model has no such data
        assert here.page.locator(f"{section} .missing").is_visible()
        assert not here.page.locator(f"{section} figure").first.is_visible()
    here.page.select_option("#model", "2")
    assert here.count("#reliability-states input[type=radio]") == 1
    assert here.text("#class-table tbody th").startswith("class ")  # this one has no names
    here.page.select_option("#model", "0")
    for place in watched:
        assert here.page.inner_html(place) == before[place], place
