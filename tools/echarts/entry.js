// The parts of Apache ECharts that the pictures of a report need: see build.sh.
export {init, use, graphic} from 'echarts/core';
import {use} from 'echarts/core';
import {BarChart, CustomChart, HeatmapChart, LineChart} from 'echarts/charts';
import {
  AriaComponent, DataZoomInsideComponent, GridComponent, LegendScrollComponent, TooltipComponent,
  VisualMapContinuousComponent
} from 'echarts/components';
import {LabelLayout} from 'echarts/features';
import {SVGRenderer} from 'echarts/renderers';

use([
  BarChart, CustomChart, HeatmapChart, LineChart,
  AriaComponent, DataZoomInsideComponent, GridComponent, LegendScrollComponent, TooltipComponent,
  VisualMapContinuousComponent, LabelLayout, SVGRenderer
]);
